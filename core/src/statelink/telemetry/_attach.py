"""From the configuration to observers of a link."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Any

from statelink.config import read_options
from statelink.errors import ConfigError
from statelink.hints import did_you_mean, install_hint
from statelink.registry import entry_points

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
    if not wanted:
        return []
    known = _known()
    found: list[Prepared] = []
    for name, options in wanted.items():
        if name not in known:
            names = f"known: {', '.join(sorted(known)) or 'none'}"
            raise _unusable(f"unknown telemetry {name!r:.80}", names, did_you_mean(name, known))
        packages = known[name]
        if len(packages) > 1:
            cause = f"{', '.join(sorted(packages))} bring one"
            raise _unusable(f"telemetry {name!r} is ambiguous", cause, "uninstall all but one of them")
        (point,) = packages.values()
        try:
            kind = point.load()
        except Exception as error:
            raise _unusable(f"telemetry {name!r} does not load", f"{type(error).__name__}: {error}") from error
        if not (isinstance(kind, type) and issubclass(kind, Observer)):
            raise _unusable(f"telemetry {name!r} cannot be used", f"{kind!r:.80} is no Observer")
        if kind.needs and not _installed(kind.needs):
            hint = install_hint(f"statelink[{kind.extra}]") if kind.extra else ""
            raise _unusable(f"telemetry {name!r} cannot be used", f"the package {kind.needs} is not installed", hint)
        found.append((kind, read_options(kind.Options, options, f"options of telemetry {name!r}")))
    return found


def _known() -> dict[str, dict[str, importlib.metadata.EntryPoint]]:
    """Name of a kind of telemetry, to the packages that bring one."""
    known: dict[str, dict[str, importlib.metadata.EntryPoint]] = {}
    for point, distribution, _ in entry_points(GROUP):
        known.setdefault(point.name, {})[distribution] = point
    return known


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


def _unusable(what: str, cause: str, hint: str = "") -> ConfigError:
    return ConfigError(what, cause=cause, hint=hint, code="config.telemetry")
