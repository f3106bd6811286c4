"""Lists backends from package metadata, and imports one by name."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.resources
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from statelink._logs import logger
from statelink.backend import API_VERSION, Backend, Probe, Strategy
from statelink.errors import (
    BackendIncompatibleError,
    BackendLoadError,
    BackendUnavailableError,
    UnknownBackendError,
)
from statelink.hints import did_you_mean, install_hint

__all__ = [
    "GROUP",
    "Listed",
    "conflict_hint",
    "entry_points",
    "hidden_backends",
    "known_packages",
    "list_backends",
    "load_backend",
    "missing_hint",
    "probed",
]

log = logger("statelink.registry")

GROUP = "statelink.backends"
CORE = "statelink"
"""The core's own distribution, whose backends are built in."""
_unreadable: set[str] = set()
SUPPORTED = range(1, API_VERSION + 1)
"""Versions of the plugin API that this core supports."""


class Listed(NamedTuple):
    """An installed backend, as its package's metadata describes it. Nothing was imported.

    Attributes:
        name: Name to configure.
        value: ``module:object`` of its entry point.
        distribution: Package that brings it.
        version: Version of that package.
    """

    name: str
    value: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}, {self.value}"


def list_backends() -> list[Listed]:
    """Installed backends, sorted by name. Several of one name are a conflict, and all are listed. Imports nothing."""
    return sorted({Listed(point.name, point.value, name, version) for point, name, version in entry_points(GROUP)})


def hidden_backends() -> list[str]:
    """Names of installed backends that ``STATELINK_PLUGINS`` leaves out, sorted. Imports nothing."""
    return sorted(_hidden(GROUP))


def _hidden(group: str) -> list[str]:
    return [point.name for point, name, _ in entry_points(group, every=True) if not _allowed(name)]


def entry_points(group: str, *, every: bool = False) -> Iterator[tuple[importlib.metadata.EntryPoint, str, str]]:
    """Entry points of a group, with name and version of their package.

    If ``STATELINK_PLUGINS`` is set, only the distributions in this comma-separated list count, and the core's own,
    unless ``every`` is true.

    Packages are read one by one, so that one with unreadable metadata hides no other. Only those that mention the group
    are read whole, since reading takes time. If a package is on the path several times, the first copy counts, as for
    imports.
    """
    seen: set[str] = set()
    for found in importlib.metadata.distributions():
        try:
            if group not in (found.read_text("entry_points.txt") or ""):
                continue
            name = found.metadata["Name"]
            if normalized(name) in seen or not (every or _allowed(name)):
                continue
            seen.add(normalized(name))
            first = importlib.metadata.distribution(name)
            version = first.version
            points = [point for point in first.entry_points if point.group == group]
        except Exception as error:
            where = str(getattr(found, "_path", "a package"))
            if where not in _unreadable:
                _unreadable.add(where)
                log.warning("cannot read the metadata of %s: %s: %s", where, type(error).__name__, error)
            continue
        for point in points:
            yield point, name, version


def _allowed(distribution: str) -> bool:
    """Whether the environment allows plugins of this package."""
    listed = os.environ.get("STATELINK_PLUGINS")
    if listed is None or normalized(distribution) == CORE:
        return True
    return normalized(distribution) in {normalized(name.strip()) for name in listed.split(",")}


def normalized(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name or "").lower()


def load_backend(name: str, among: Sequence[Listed] | None = None) -> type[Backend]:
    """Import the backend called ``name``.

    Args:
        name: Its name.
        among: The result of `list_backends`, if the caller has it. Reading all metadata takes time.

    Raises:
        UnknownBackendError: No backend has that name. The hint says whether it is a typing error or a known package.
        BackendLoadError: Several backends have that name, its import failed, or it is not a backend.
        BackendIncompatibleError: It was written for another version of the plugin API.
    """
    listed = [each for each in (list_backends() if among is None else among) if each.name == name]
    if not listed:
        raise _unknown(name)
    if len(listed) > 1:
        raise BackendLoadError(
            f"backend {name!r} is brought by {len(listed)} packages",
            cause="; ".join(map(str, listed)),
            hint=conflict_hint(listed),
            code="backend.conflict",
        )
    (chosen,) = listed
    try:
        loaded: Any = importlib.metadata.EntryPoint(chosen.name, chosen.value, GROUP).load()
    except (Exception, SystemExit) as error:  # some modules call sys.exit() on a machine that does not suit them
        raise BackendLoadError(
            f"backend {name!r} ({chosen}) failed to load", cause=f"{type(error).__name__}: {error}"
        ) from error
    _check(chosen, loaded)
    backend: type[Backend] = loaded
    return backend


def conflict_hint(listed: Sequence[Listed]) -> str:
    """What to do about several backends of one name. One of the core's own cannot be uninstalled."""
    others = [each.distribution for each in listed if normalized(each.distribution) != CORE]
    if len(others) == len(listed):
        return "uninstall all but one of them"
    return f"{listed[0].name!r} is built in: rename yours in {', '.join(others)}, or uninstall it"


def probed(backend: type[Backend], options: Any) -> Probe:
    """Ask a backend whether it can run here.

    Args:
        backend: Its class.
        options: An instance of its ``Options``.

    Raises:
        BackendUnavailableError: Its ``probe`` raised, or returned something else than a `Probe`.
    """
    try:
        found: object = backend.probe(options)
    except (Exception, SystemExit) as error:  # a probe must not raise
        raise _defective(backend, f"its probe raised {type(error).__name__}: {error}") from error
    if not isinstance(found, Probe):
        raise _defective(backend, f"its probe returned {found!r:.60}, and not a Probe")
    return found


def _defective(backend: type[Backend], cause: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"backend {backend.name!r} cannot say whether it runs here",
        cause=cause,
        hint=f"tell the author of the package; `statelink conform {backend.name} -k Declaration` tests it",
        code="backend.defect",
    )


def _check(chosen: Listed, loaded: Any) -> None:
    who = f"backend {chosen.name!r} ({chosen})"
    if not isinstance(loaded, type) or not issubclass(loaded, Backend):
        raise BackendLoadError(f"{who} is not a backend", cause=f"it is {loaded!r:.120}, not a subclass of Backend")
    spoken = getattr(loaded, "api_version", None)
    if not isinstance(spoken, int):
        raise BackendLoadError(f"{who} does not state its plugin API", hint="add the class attribute api_version = 1")
    if spoken not in SUPPORTED:
        newer = spoken >= SUPPORTED.stop
        hint = install_hint("statelink" if newer else chosen.distribution, upgrade=True)
        own = f"; if the backend is yours, write api_version = {API_VERSION}, which this core speaks" if newer else ""
        raise BackendIncompatibleError(
            f"{who} was built for plugin API {spoken}, this core speaks {_span(SUPPORTED)}", hint=hint + own
        )
    missing = [each for each in ("name", "Options", "capabilities", "strategies") if not hasattr(loaded, each)]
    missing += sorted(loaded.__abstractmethods__)
    if missing:
        raise BackendLoadError(f"{who} is incomplete", cause=f"it lacks {', '.join(missing)}")
    _check_strategies(who, loaded)
    if not (isinstance(loaded.Options, type) and issubclass(loaded.Options, msgspec.Struct)):
        raise BackendLoadError(f"{who} has no typed options", hint="Options is a subclass of msgspec.Struct")
    bare = [field.name for field in msgspec.structs.fields(loaded.Options) if field.required]
    if bare:
        raise BackendLoadError(
            f"{who} has options without a default",
            cause=", ".join(bare),
            hint="give each field of Options a default; `probe` and the constructor may refuse it",
        )
    if loaded.name != chosen.name:
        raise BackendLoadError(
            f"{who} calls itself {loaded.name!r}",
            hint="entry-point name and Backend.name are one and the same",
        )


def _check_strategies(who: str, loaded: type[Backend]) -> None:
    """Each state type that a backend declares has a strategy in its table."""
    table: object = loaded.strategies
    if not isinstance(table, Mapping) or not all(isinstance(each, Strategy) for each in table.values()):
        raise BackendLoadError(
            f"{who} has no table of strategies",
            cause=f"strategies is {table!r:.120}",
            hint='map state types to strategies; strategies = {"*": DIRECT} serves all',
        )
    lacking = sorted(set() if "*" in table else loaded.capabilities.state_types - table.keys())
    if lacking:
        every = lacking == ["*"]
        has = ", ".join(sorted(table)) or "none"
        raise BackendLoadError(
            f"{who} declares state types without a strategy",
            cause=f"{'every type' if every else ', '.join(lacking)}; strategies has {has}",
            hint='add "*": DIRECT to strategies, or declare in state_types only what the backend moves',
        )


def _unknown(name: str) -> UnknownBackendError:
    installed = sorted({each.name for each in list_backends()})
    return UnknownBackendError(
        f"no backend named {name!r} in group {GROUP!r} (installed: {', '.join(installed) or 'none'})",
        hint=missing_hint(GROUP, name, "see 'statelink backends'"),
        code="backend.not_installed" if name in known_packages(GROUP) else "backend.unknown",
    )


def missing_hint(group: str, name: str, otherwise: str = "") -> str:
    """A hint for a name of which no package brings an entry point: what to install or to allow, or a name that is near.

    Args:
        group: The group of entry points.
        name: The name.
        otherwise: The hint if nothing is known.
    """
    known = known_packages(group)
    distribution = known.get(name)
    if distribution is not None:
        if os.environ.get("STATELINK_PLUGINS") is not None and _is_installed(distribution):
            return f"add {distribution} to the environment variable STATELINK_PLUGINS"
        return "; ".join(filter(None, (install_hint(distribution), _data("notes.json").get(distribution))))
    guessed = f"statelink-{normalized(name)}"
    if _is_installed(guessed):
        if name in _hidden(group):
            return f"add {guessed} to the environment variable STATELINK_PLUGINS"
        return f"the package {guessed} is installed, and has no entry point {name!r} in that group"
    return did_you_mean(name, {*(point.name for point, _, _ in entry_points(group)), *known}, otherwise)


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def known_packages(group: str = GROUP) -> dict[str, str]:
    """Name of an entry point to the package that brings it. It is a data file, because the core's code names none."""
    known: dict[str, str] = _data("known.json").get(group, {})
    return known


@functools.cache
def _data(name: str) -> dict[str, Any]:
    text = importlib.resources.files(__package__ or "statelink.registry").joinpath(name).read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def _span(versions: range) -> str:
    return str(versions.start) if len(versions) == 1 else f"{versions.start} to {versions.stop - 1}"
