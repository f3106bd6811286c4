"""Imports the class that a package brings under a name, for groups whose classes are a matter of the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from statelink.errors import ConfigError

from ._backends import entry_points, missing_hint

if TYPE_CHECKING:
    import importlib.metadata

__all__ = ["load_named"]

Kind = TypeVar("Kind")


def load_named(group: str, name: str, base: type[Kind], *, what: str, code: str) -> type[Kind]:
    """Import the class that an entry point names.

    Args:
        group: The group of the entry point.
        name: Its name.
        base: What the class has to be a subclass of.
        what: What such a class is, for errors.
        code: The code of errors.

    Raises:
        ConfigError: No package brings it, or several do; it does not load, is another class, or lacks a method.
    """
    known: dict[str, dict[str, importlib.metadata.EntryPoint]] = {}
    for point, distribution, _ in entry_points(group):
        known.setdefault(point.name, {})[distribution] = point
    packages = known.get(name, {})
    called = f"{what} {name!r:.80}"
    if not packages:
        cause = f"known: {', '.join(sorted(known)) or 'none'}"
        raise ConfigError(f"unknown {called}", cause=cause, hint=missing_hint(group, name), code=code)
    if len(packages) > 1:
        cause = f"{', '.join(sorted(packages))} bring one"
        raise ConfigError(f"{called} is ambiguous", cause=cause, hint="uninstall all but one of them", code=code)
    (point,) = packages.values()
    try:
        kind = point.load()
    except (Exception, SystemExit) as error:  # some modules call sys.exit() on a machine that does not suit them
        raise ConfigError(f"{called} does not load", cause=f"{type(error).__name__}: {error}", code=code) from error
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ConfigError(f"{called} cannot be used", cause=f"{kind!r:.80} is no {base.__name__}", code=code)
    if lacking := sorted(getattr(kind, "__abstractmethods__", ())):
        raise ConfigError(f"{called} cannot be used", cause=f"it lacks {', '.join(lacking)}", code=code)
    return kind
