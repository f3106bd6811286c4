"""Picks the backend of a link: by name, or the best one that can move what a rank holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from statelink._logs import logger
from statelink.backend import Backend, Fence, Fencing, Strategy, Transports
from statelink.backend._interface import cannot_register
from statelink.config import read_options
from statelink.errors import BackendUnavailableError, ConfigError, StatelinkError, UnsupportedError
from statelink.hints import did_you_mean
from statelink.registry import known_packages, list_backends, load_backend, probed

if TYPE_CHECKING:
    import pluggy

    from statelink.config import Given, LinkConfig
    from statelink.state import Inventory

__all__ = ["AUTO", "Picked", "check_options", "check_transport", "pick"]

log = logger("statelink.open")

AUTO = "auto"
"""As a backend's name: the backend of highest priority that can run here."""


class Picked(NamedTuple):
    """The backend of a link.

    Attributes:
        kind: Its class.
        options: An instance of its ``Options``.
        strategies: Component to strategy.
        rejected: Every other backend that ``auto`` considered, and why it was not taken.
    """

    kind: type[Backend]
    options: Any
    strategies: dict[str, Strategy]
    rejected: dict[str, str]


def pick(given: Given, inventory: Inventory, hooks: pluggy.PluginManager) -> Picked:
    """Find the backend for a configuration, and check it as far as possible without opening it.

    Raises:
        ConfigError: An option is wrong.
        BackendError: The backend is not installed, does not load, cannot run here, or does not declare what the
            inventory or ``require`` needs. With ``auto``: every backend does so.
    """
    name, options = given.config.backend, given.config.options
    if name != AUTO:
        kind = load_backend(name)
        _check_flat(kind, options, given)
        return _fit(kind, options, given, inventory, hooks)
    candidates, rejected = _candidates()
    parsed = _parse_tables(options, candidates, candidates.keys() | rejected.keys(), given)
    chosen: Picked | None = None
    for each, kind in candidates.items():
        if chosen is not None:
            order = f"priority {kind.capabilities.priority}, and {chosen.kind.name!r}"
            rejected[each] = f"{order} with {chosen.kind.capabilities.priority} can carry this"
            continue
        try:
            chosen = _fit(kind, parsed.get(each, {}), given, inventory, hooks)
        except StatelinkError as error:
            rejected[each] = str(error).replace("\nhint:", "; hint:")
        except (Exception, SystemExit) as error:  # what a class method raises rejects only its own backend
            rejected[each] = f"it raised {type(error).__name__}: {error}"
    why = "; ".join(f"{each}: {reason}" for each, reason in rejected.items())
    if chosen is None:
        raise BackendUnavailableError(
            "no installed backend can carry this rank's state here",
            cause=why or "none is installed",
            hint="see 'statelink doctor'",
            code="backend.none",
            instance=inventory.instance,
            rank=inventory.rank,
        )
    log.info("backend %r is taken for %s; %s", chosen.kind.name, inventory.instance, why or "no other is installed")
    return chosen._replace(rejected=rejected)


def check_options(given: Given) -> None:
    """Check the options of the backend, or with ``auto`` those of every installed backend. Opens nothing.

    Raises:
        ConfigError: An option is wrong, or with ``auto`` a key is no backend.
        BackendError: The backend is not installed, or does not load.
    """
    name, options = given.config.backend, given.config.options
    if name != AUTO:
        kind = load_backend(name)
        _check_flat(kind, options, given)
        _options(kind, options, given)
        return
    candidates, rejected = _candidates()
    _parse_tables(options, candidates, candidates.keys() | rejected.keys(), given)


def check_transport(kind: type[Backend], options: Any, config: LinkConfig) -> None:
    """Check what a configuration asks of a backend, and what needs no inventory: the role, and `require`.

    Raises:
        UnsupportedError: The backend cannot do it.
    """
    _check_role(kind, config.role)
    _check_required(kind, options, config.require)


def _candidates() -> tuple[dict[str, type[Backend]], dict[str, str]]:
    """The backends that load, best first, and for those that do not load the reason."""
    loaded: dict[str, type[Backend]] = {}
    rejected: dict[str, str] = {}
    listed = list_backends()
    for name in dict.fromkeys(each.name for each in listed):
        try:
            loaded[name] = load_backend(name, listed)
        except StatelinkError as error:
            rejected[name] = str(error).replace("\nhint:", "; hint:")
    order = sorted(loaded, key=lambda name: (-loaded[name].capabilities.priority, name))
    return {name: loaded[name] for name in order}, rejected


def _parse_tables(
    options: Mapping[str, Any], candidates: Mapping[str, type[Backend]], installed: Collection[str], given: Given
) -> dict[str, Any]:
    """With ``auto``, the options of each backend that loads and has some."""
    _check_tables(options, installed, given)
    return {each: _options(kind, options[each], given) for each, kind in candidates.items() if each in options}


def _check_tables(options: Mapping[str, Any], installed: Collection[str], given: Given) -> None:
    """With ``auto``, every key of ``options`` is a backend. A known one may be installed on other machines only."""
    for key in options:
        if key not in installed and key not in known_packages():
            raise ConfigError(
                f"unknown key {key!r} in the options",
                cause=f"with backend 'auto' each key names a backend; installed: {', '.join(sorted(installed))}",
                hint=did_you_mean(key, installed),
                code="config.key",
                **given.origin("options"),
            )


def _check_flat(kind: type[Backend], options: Mapping[str, Any], given: Given) -> None:
    """With a backend by name, ``options`` are its own.

    A table with its name is a mistake, and would be for ``auto``.
    """
    known = [field.encode_name for field in msgspec.structs.fields(kind.Options)]
    if kind.name not in known and isinstance(options.get(kind.name), Mapping):
        raise ConfigError(
            f"unknown key {kind.name!r} in the options of backend {kind.name!r}",
            cause=f"known keys: {', '.join(sorted(known)) or 'none'}",
            hint="options in a table for each backend are for backend 'auto': write them into 'options' itself",
            code="config.key",
            **given.origin("options"),
        )


def _options(kind: type[Backend], options: Any, given: Given) -> Any:
    return read_options(kind.Options, options, f"options of backend {kind.name!r}", **given.origin("options"))


def _fit(kind: type[Backend], raw: Any, given: Given, inventory: Inventory, hooks: pluggy.PluginManager) -> Picked:
    """One backend, if it can."""
    options = _options(kind, raw, given)
    strategies = _strategies(kind, inventory, hooks)
    _check_role(kind, given.config.role)
    _check_declared(kind, options, inventory)
    probe = probed(kind, options)
    if not probe.ok:
        raise BackendUnavailableError(f"backend {kind.name!r} cannot run here", cause=probe.reason, hint=probe.hint)
    _check_required(kind, options, given.config.require)
    return Picked(kind, options, strategies, {})


def _check_role(kind: type[Backend], role: str) -> None:
    """Refuse a link that sends and receives, over a backend that does only one of the two.

    Raises:
        UnsupportedError: It is such a backend.
    """
    if role == "both" and not kind.capabilities.both_roles:
        raise UnsupportedError(
            f"backend {kind.name!r} cannot serve a link of the role 'both'",
            cause="it declares that one of its objects either sends or receives",
            hint="open a link with the role 'prefill' and another with 'decode', in processes of their own",
            code="backend.roles",
        )


def _check_required(kind: type[Backend], options: Any, require: Collection[str]) -> None:
    """Refuse a backend that certainly does not use a required transport, or that can never tell its transport.

    Raises:
        UnsupportedError: It is such a backend. The error names it and the transport.
    """
    if not require:
        return
    wanted = " or ".join(sorted(require))
    if not issubclass(kind, Transports):
        raise UnsupportedError(
            f"backend {kind.name!r} cannot tell which transport carries its bytes",
            cause=f"{wanted} is required",
            code="backend.transport",
        )
    possible = _possible(kind, options)
    if possible and not possible & set(require):
        raise UnsupportedError(
            f"backend {kind.name!r} does not use a required transport here",
            cause=f"{wanted} is required, and with these options it uses {' or '.join(sorted(possible))}",
            hint="see 'statelink doctor' for the devices of this machine",
            code="backend.transport",
        )


def _possible(kind: type[Transports], options: Any) -> Set[str]:
    """The transports that a backend says it could use; empty if it cannot tell.

    Raises:
        UnsupportedError: Its ``transports`` raised, or returned something else than a set of words.
    """
    name = getattr(kind, "name", kind.__name__)
    found: object = None
    try:
        found = kind.transports(options)
        problem = "" if _is_words(found) else f"its `transports` returned {found!r:.60}, and not a frozenset of str"
    except (Exception, SystemExit) as error:  # it must not raise
        problem = f"its `transports` raised {type(error).__name__}: {error}"
    if problem:
        raise UnsupportedError(
            f"backend {name!r} cannot tell which transports it could use",
            cause=problem,
            hint=f"tell the author of the package; `statelink conform {name} -k Declaration` tests it",
            code="backend.defect",
        )
    words: Any = found
    return frozenset(words)


def _is_words(found: object) -> bool:
    return isinstance(found, Set) and all(isinstance(each, str) for each in found)


def _strategies(backend_type: type[Backend], inventory: Inventory, hooks: pluggy.PluginManager) -> dict[str, Strategy]:
    """Component to strategy. An installed package's choice comes before the backend's own table.

    Raises:
        UnsupportedError: Neither has the state type, or the backend does not declare it.
    """
    table = backend_type.strategies
    chosen: dict[str, Strategy] = {}
    for component in inventory.components:
        kind = component.kind.name
        try:
            strategy = hooks.hook.statelink_strategy(backend=backend_type.name, state_type=kind)
        except Exception as error:
            raise UnsupportedError(
                f"a plugin's choice of a strategy for state type {kind!r} over backend {backend_type.name!r} failed",
                cause=f"{type(error).__name__}: {error}",
                code="backend.defect",
                component=component.name,
            ) from error
        if strategy is None and backend_type.capabilities.moves(kind):
            strategy = table.get(kind, table.get("*"))
        if strategy is None:
            declared = sorted(
                backend_type.capabilities.state_types & table.keys() or backend_type.capabilities.state_types
            )
            raise UnsupportedError(
                f"backend {backend_type.name!r} does not move state type {kind!r}",
                cause=f"it declares {', '.join(declared)}",
                hint="use another backend, or install a package that brings a strategy for this type",
                component=component.name,
                instance=inventory.instance,
                rank=inventory.rank,
            )
        if not isinstance(strategy, Strategy):
            raise UnsupportedError(
                f"the strategy for state type {kind!r} over backend {backend_type.name!r} is not a Strategy",
                cause=f"got {strategy!r:.120}",
            )
        chosen[component.name] = strategy
    return chosen


def _check_declared(backend_type: type[Backend], options: Any, inventory: Inventory) -> None:
    """Refuse what the backend does not declare, or not with these options, before it is constructed."""
    declared = backend_type.capabilities
    for kind in dict.fromkeys(region.kind for region in inventory.regions):
        cause = cannot_register(backend_type, options, kind)
        if cause:
            raise UnsupportedError(
                f"backend {backend_type.name!r} cannot register memory of kind {kind!r}",
                cause=cause,
                instance=inventory.instance,
                rank=inventory.rank,
            )
    if declared.target is Fence.OWNER and not issubclass(backend_type, Fencing):
        raise UnsupportedError(
            f"backend {backend_type.name!r} declares an owner's fence and does not implement grant and revoke"
        )
