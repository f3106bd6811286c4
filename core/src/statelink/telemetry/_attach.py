"""From the configuration to observers of a link."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from statelink.config import read_options
from statelink.errors import ConfigError
from statelink.hints import install_hint
from statelink.registry import load_named

from ._observer import Observer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pluggy

    from statelink.link import Link

__all__ = ["GROUP", "attach", "prepare"]

GROUP = "statelink.telemetry"

Prepared = tuple[type[Observer], Any]
"""A kind of telemetry, and its options."""


def prepare(wanted: Mapping[str, Mapping[str, Any]]) -> list[Prepared]:
    """Load the kinds of telemetry that are configured, and read their options. Opens nothing.

    Args:
        wanted: Name to options, as configured.

    Raises:
        ConfigError: A name is unknown, or several packages bring it; an option is wrong; a library is not installed.
    """
    found: list[Prepared] = []
    for name, options in wanted.items():
        kind = load_named(GROUP, name, Observer, what="telemetry", code="config.telemetry")
        if kind.needs and not _installed(kind.needs):
            hint = install_hint(f"statelink[{kind.extra}]") if kind.extra else ""
            raise ConfigError(
                f"telemetry {name!r} cannot be used",
                cause=f"the package {kind.needs} is not installed",
                hint=hint,
                code="config.telemetry",
            )
        found.append((kind, read_options(kind.Options, options, f"options of telemetry {name!r}")))
    return found


def attach(prepared: Sequence[Prepared], link: Link, hooks: pluggy.PluginManager) -> None:
    """Let a link be observed, until it is closed.

    Raises:
        ConfigError: An observer cannot begin, for example because its port is taken. None is left behind.
    """
    made: list[Observer] = []
    try:
        for kind, options in prepared:
            made.append(kind(options, link))
            made[-1].register(hooks)
    except BaseException:
        for each in made:
            each.statelink_link_closed(link)
        raise


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package inside one that is missing
        return False
