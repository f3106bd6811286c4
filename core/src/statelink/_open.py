"""Opening a link: the one place where configuration, registry and lifecycle meet."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from statelink.backend import Backend, BackendContext, Fence, Fencing, Op, Probe, Side, Strategy
from statelink.errors import (
    BackendUnavailableError,
    ConfigError,
    StatelinkError,
    TransferError,
    UnsupportedError,
)
from statelink.link import (
    Link,
    LinkConfig,
    Node,
    Place,
    Rendezvous,
    StaticRendezvous,
    check_verify,
    read_options,
    this_process,
)
from statelink.registry import load_backend, plugin_manager
from statelink.rendezvous import RendezvousClient
from statelink.state._types import load_types_with
from statelink.wire import PROTOCOL, Card, Channel, Keys, is_loopback

if TYPE_CHECKING:
    import pluggy

    from statelink.state import Inventory, StateType

__all__ = ["__version__", "open", "probe"]

# Whoever describes state of a type that a package brings need not load the package first.
load_types_with(plugin_manager)

try:
    __version__ = version("statelink")
except PackageNotFoundError:  # a source tree on the path, not installed
    __version__ = "0+source"


def open(config: LinkConfig | Mapping[str, Any], inventory: Inventory, *, rendezvous: Rendezvous | None = None) -> Link:
    """Open a rank's link: load the backend, register memory, and listen. Blocks until that is done.

    Args:
        config: See `LinkConfig`; a mapping is checked and converted.
        inventory: What this rank holds. The memory must outlive the link.
        rendezvous: Where instances are found; the configured addresses and server when not given.

    Raises:
        ConfigError: The configuration is wrong, or would listen beyond loopback without keys.
        UnknownBackendError: No such backend is installed.
        BackendError: The backend fails to load, cannot run here, does not declare what the inventory needs, or has as
            many links in this process as it declares.
    """
    settings = LinkConfig.read(config)
    backend_type = load_backend(settings.backend)
    who = {"backend": settings.backend}
    options = read_options(backend_type.Options, settings.options, f"options of backend {settings.backend!r}")
    if rendezvous is not None and settings.rendezvous:
        raise ConfigError("two rendezvous are given", cause="one in the configuration, and one as an argument", **who)
    name = f"{inventory.instance[:48]}.{inventory.rank}-{secrets.token_hex(8)}"
    place = Place(backend_type, name)
    try:
        found, node = _prepare(settings, backend_type, options, name, inventory, rendezvous, place)
    except BaseException:
        place.free()
        raise
    link = Link(node)
    if isinstance(found, RendezvousClient):
        found.register(inventory.instance, inventory.rank, inventory.ranks, link.address)
    return link


def _prepare(
    settings: LinkConfig,
    backend_type: type[Backend],
    options: object,
    name: str,
    inventory: Inventory,
    rendezvous: Rendezvous | None,
    place: Place,
) -> tuple[Rendezvous, Node]:
    """Everything but starting; if that fails, nothing is left open."""
    who = {"backend": settings.backend}
    hooks = plugin_manager()
    probe = backend_type.probe(options)
    if not probe.ok:
        raise BackendUnavailableError(
            f"backend {settings.backend!r} cannot run here", cause=probe.reason, hint=probe.hint
        )
    strategies = _strategies(backend_type, inventory, hooks)
    _check_capabilities(backend_type, settings, inventory)
    keys = settings.keys or Keys.from_environment()
    channel = Channel(name, settings.listen, advertise=settings.advertise, keys=keys, insecure=settings.insecure)
    try:
        backend = _construct(backend_type, options, name, settings.role, channel)
    except BaseException:
        channel.close()
        raise
    found = rendezvous or StaticRendezvous(settings.peers)
    try:
        if settings.rendezvous:
            found = RendezvousClient(settings.rendezvous, link=name, keys=keys, peers=settings.peers)
        backend.register(inventory.regions)
        card = _card(name, settings, backend, strategies, inventory)
        return found, Node(settings, channel, backend, card, strategies, found, hooks, closed=place.free)
    except BaseException as error:
        channel.close()
        backend.close()
        found.close()
        if isinstance(error, StatelinkError) or not isinstance(error, Exception):
            raise
        raise TransferError(
            "memory could not be registered", cause=f"{type(error).__name__}: {error}", **who
        ) from error


def probe(backend: str, options: Mapping[str, Any] | None = None) -> Probe:
    """Whether a backend can run on this machine, and if not, why. Imports the backend; opens nothing.

    Args:
        backend: Its name.
        options: Its options.

    Raises:
        UnknownBackendError: No such backend is installed.
        BackendLoadError: It does not load.
        ConfigError: An option is wrong.
    """
    backend_type = load_backend(backend)
    return backend_type.probe(read_options(backend_type.Options, options or {}, f"options of backend {backend!r}"))


def _construct(backend_type: type[Backend], options: object, name: str, role: str, channel: Channel) -> Backend:
    context = BackendContext(
        options=options,
        link=name,
        host=channel.host,
        loopback=is_loopback(channel.endpoint.address),
        role=role,
    )
    try:
        return backend_type(context)
    except StatelinkError:
        raise
    except Exception as error:
        raise BackendUnavailableError(
            f"backend {backend_type.name!r} did not start", cause=f"{type(error).__name__}: {error}"
        ) from error


def _card(
    name: str,
    settings: LinkConfig,
    backend: Backend,
    strategies: Mapping[str, Strategy],
    inventory: Inventory,
) -> Card:
    kinds: dict[str, StateType] = {component.kind.name: component.kind for component in inventory.components}
    return Card(
        link=name,
        protocol=PROTOCOL,
        version=__version__,
        role=settings.role,
        backend=backend.name,
        ops=tuple(sorted(op.value for op in backend.capabilities.ops)),
        kinds=tuple(kinds[each] for each in sorted(kinds)),
        strategies={component: strategy.name for component, strategy in strategies.items()},
        descriptor=backend.descriptor(),
        inventory=inventory,
        process=this_process(),
        verify=settings.verify,
    )


def _strategies(backend_type: type[Backend], inventory: Inventory, hooks: pluggy.PluginManager) -> dict[str, Strategy]:
    """Component to strategy: an installed package's word first, then the backend's own table.

    Raises:
        UnsupportedError: A state type is in neither, or not declared.
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


def _check_capabilities(backend_type: type[Backend], settings: LinkConfig, inventory: Inventory) -> None:
    """Refuse what the backend does not declare, before it is even constructed."""
    declared = backend_type.capabilities
    for region in inventory.regions:
        kind = region.kind.partition(":")[0]
        if kind not in declared.memory_kinds:
            raise UnsupportedError(
                f"backend {backend_type.name!r} cannot register memory of kind {region.kind!r}",
                cause=f"it declares {', '.join(sorted(declared.memory_kinds))}",
                instance=inventory.instance,
                rank=inventory.rank,
            )
    if Op.WRITE not in declared.ops:
        raise UnsupportedError(
            f"backend {backend_type.name!r} does not offer WRITE",
            cause=f"direction {settings.direction!r} pushes from prefill to decode",
        )
    if declared.fences[Op.WRITE, Side.TARGET] is Fence.OWNER and not issubclass(backend_type, Fencing):
        raise UnsupportedError(
            f"backend {backend_type.name!r} declares an owner's fence and does not implement grant and revoke"
        )
    if settings.verify != "off":
        check_verify(inventory)
    if not inventory.components:
        raise ConfigError("the inventory has no components", instance=inventory.instance, rank=inventory.rank)
