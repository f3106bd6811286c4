"""Opens a link from its configuration, a backend and an inventory. Closes what it opened where a step fails."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import msgspec

from statelink._logs import logger
from statelink.backend import Backend, BackendContext, Probe, Strategy
from statelink.config import LinkConfig, read_config, read_options
from statelink.errors import BackendUnavailableError, ConfigError, StateError, StatelinkError
from statelink.hints import MORE_THREADS
from statelink.link import Context, Link, Rendezvous, StaticRendezvous, check_verify, opening, this_process
from statelink.pointers import Checked, Platform, check, device_settings, hint_at_settings
from statelink.registry import load_backend, plugin_manager, probed
from statelink.rendezvous import Directory, connecting
from statelink.rendezvous._connect import DirectoryRendezvous
from statelink.state import Inventory
from statelink.state._types import load_types_with
from statelink.telemetry import attach
from statelink.wire import (
    PROTOCOL,
    Channel,
    Handshake,
    check_descriptors,
    data_hosts,
    host_of,
    is_loopback,
    link_name,
    no_descriptors,
)

from ._checks import check_config
from ._select import pick
from ._slots import LinkSlot
from ._staging import choose_staging, open_strategies

if TYPE_CHECKING:
    import os

    import pluggy

    from statelink.state import StateType
    from statelink.wire import Keys

    from ._select import Picked

__all__ = ["__version__", "open", "probe"]

log = logger("statelink.open")

NO_THREAD = "can't start new thread"
"""What Python says where the system refuses a thread."""

# An engine may use a state type of an installed package without loading that package first.
load_types_with(plugin_manager)

try:
    __version__ = version("statelink")
except PackageNotFoundError:  # not installed: a source tree on the path
    __version__ = "0+source"


def open(
    config: LinkConfig | Mapping[str, Any] | str | os.PathLike[str] | None,
    inventory: Inventory,
    *,
    rendezvous: Rendezvous | None = None,
) -> Link:
    """Open a rank's link: load the backend, register memory, and listen. Blocks until this is done.

    Args:
        config: A `LinkConfig`, a mapping, or the path of a TOML or JSON file. Environment variables take precedence
            over a file (``STATELINK_LISTEN`` over ``listen``). ``None`` takes everything from the environment, in which
            ``STATELINK_CONFIG`` may name a file.
        inventory: What this rank holds. The link keeps no reference to its arrays: the caller keeps them until the link
            is closed. If they are freed earlier, requests corrupt memory that is in use elsewhere, without an error.
        rendezvous: Finds instances. The default uses the configured addresses and server.

    Raises:
        ConfigError: The configuration is wrong, or would listen beyond loopback without keys; or the process has too
            few file descriptors or threads left.
        StateError: A region is not the kind of memory that the inventory says; see docs/engine.md.
        UnknownBackendError: No such backend is installed.
        BackendError: The backend fails to load, cannot run here, does not declare what the inventory or ``require``
            needs, or has as many links in this process as it declares. With ``auto``: every backend does so.
    """
    check_descriptors()
    try:
        with opening():
            return _open(config, inventory, rendezvous)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise no_descriptors(error) from error
        raise
    except RuntimeError as error:
        if str(error) != NO_THREAD:
            raise
        raise ConfigError(
            "no thread can be started for a link",
            cause="the system, or the container, allows this process no more of them",
            hint=MORE_THREADS,
            code="config.threads",
        ) from error


def _open(
    config: LinkConfig | Mapping[str, Any] | str | os.PathLike[str] | None,
    inventory: Inventory,
    rendezvous: Rendezvous | None,
) -> Link:
    given = read_config(config)
    settled = check_config(given)
    described: object = inventory  # without a type checker, an engine may pass what `describe` takes
    if not isinstance(described, Inventory):
        got = f"got {type(described).__name__}"
        raise StateError("an inventory is expected", cause=got, hint="statelink.state.describe makes one")
    if not inventory.components and inventory.ranks == 1:
        raise ConfigError(
            "the inventory has no components",
            cause="it is the only rank of its instance, which then has no state to move",
            hint="describe what the rank holds; only a rank among others, such as a stage without state, has nothing",
            instance=inventory.instance,
            rank=inventory.rank,
        )
    _check_ranks(inventory)
    hooks = plugin_manager()
    picked = pick(given, inventory, hooks)
    checked = check(inventory, role=given.config.role, platform=Platform.here())
    for setting in device_settings(checked):
        log.warning("rank %d of %s: %s", inventory.rank, inventory.instance, setting)
    settings = msgspec.structs.replace(given.config, backend=picked.kind.name)
    picked = picked._replace(strategies=choose_staging(picked.strategies, picked.kind, settings.staging, settings.role))
    opened = contextlib.ExitStack()
    try:
        whole = open_strategies(picked.strategies, inventory, opened)
        if settings.verify != "off":
            check_verify(whole, checked.readers().keys())
        if rendezvous is not None and settings.rendezvous:
            what = "two rendezvous are given"
            raise ConfigError(what, cause="one in the configuration, and one as an argument", backend=settings.backend)
        name = link_name(f"{inventory.instance[:40]}.{inventory.rank}", settled["keys"])
        slot = LinkSlot(picked.kind, name)
        opened.callback(slot.free)

        def check_again() -> Checked:
            return check(inventory, role=settings.role, platform=Platform.here())

        checks = checked, check_again
        directory, context = _prepare(
            settings, picked, name, whole, rendezvous, hooks, slot, checks, settled["keys"], opened
        )
        link = Link(context)
    except BaseException:
        opened.close()
        raise
    try:
        attach(settled["telemetry"], link, hooks)
        if directory is not None:
            directory.register(inventory.instance, inventory.rank, inventory.ranks, link.address)
        context.tell("statelink_link_opened", link=link)
    except BaseException:  # also an interrupt, and what leaves an observer
        link.close()
        raise
    return link


def _check_ranks(inventory: Inventory) -> None:
    """Compare the parts that components are said to be with the rank. The other side cannot see such a mistake."""
    rank, ranks = inventory.rank, inventory.ranks
    for component in inventory.components:
        parts = {"partition": (component.partition.index, component.partition.size)}
        if component.share:
            parts["tp"] = (component.share.index, component.share.size)
        for name, (index, size) in parts.items():
            if size > ranks:
                raise StateError(
                    f"component {component.name!r} is a part of what {size} ranks hold together",
                    cause=f"its {name} is ({index}, {size}), and the inventory has ranks={ranks}",
                    hint="pass rank= and ranks= to describe()",
                    instance=inventory.instance,
                    rank=rank,
                )
        index, size = parts.get("tp", (rank, ranks))
        if size == ranks and index != rank and "tp" not in inventory.axes:
            raise StateError(
                f"component {component.name!r} is the share of another rank",
                cause=f"its tp is ({index}, {size}), and this is rank {rank} of {ranks}",
                hint="if the engine numbers its ranks in another order than their shares, pass "
                f"axes={{'tp': ({index}, {size})}} to describe(), too",
                instance=inventory.instance,
                rank=rank,
            )


def _prepare(
    settings: LinkConfig,
    picked: Picked,
    name: str,
    inventory: Inventory,
    rendezvous: Rendezvous | None,
    hooks: pluggy.PluginManager,
    slot: LinkSlot,
    checks: tuple[Checked, Callable[[], Checked]],
    keys: Keys | None,
    opened: contextlib.ExitStack,
) -> tuple[Directory | None, Context]:
    """Prepare everything, and start nothing. ``opened`` closes what this opens.

    Returns the directory to register with, if there is one.

    ``checks``: what was found out about the memory, and how to find it out again.
    """
    checked, check_again = checks
    channel = Channel(name, settings.listen, advertise=settings.advertise, keys=keys, insecure=settings.insecure)
    opened.callback(channel.close)

    def start(registration: int) -> tuple[Backend, Handshake]:
        backend = _construct(picked, name, settings, channel)
        try:
            with hint_at_settings(checked, backend=settings.backend):
                backend.register(inventory.regions)
                own = _own_handshake(name, settings, backend, picked.strategies, inventory)
        except BaseException:
            backend.close()
            raise
        return backend, msgspec.structs.replace(own, registration=registration)

    def start_again(registration: int) -> tuple[Backend, Handshake]:
        check_again()
        return start(registration)

    backend, own = start(0)
    opened.callback(backend.close)
    directory: Directory | None = None
    if settings.rendezvous:
        directory = connecting(settings, link=name, keys=keys)
        opened.callback(directory.close)
    found = rendezvous or StaticRendezvous(settings.peers)
    if directory is not None:
        found = DirectoryRendezvous(directory, settings.peers)
    opened.callback(found.close)
    context = Context(
        settings,
        channel,
        backend,
        own,
        picked.strategies,
        found,
        hooks,
        rejected=picked.rejected,
        memory=checked.summary(),
        closed=slot.free,
        explained=partial(hint_at_settings, checked),
        start=start_again,
        begin=checked.binding(),
        readers=checked.readers(),
        flush=checked.flushing() if settings.role != "prefill" else None,
    )
    return directory, context


def probe(backend: str, options: Mapping[str, Any] | None = None) -> Probe:
    """Whether a backend can run on this machine, and if not, why. Imports the backend; opens nothing.

    Args:
        backend: Its name.
        options: Its options.

    Raises:
        UnknownBackendError: No such backend is installed.
        BackendLoadError: It does not load.
        ConfigError: An option is wrong.
        BackendUnavailableError: Its ``probe`` raised, or returned no `Probe`.
    """
    backend_type = load_backend(backend)
    return probed(backend_type, read_options(backend_type.Options, options or {}, f"options of backend {backend!r}"))


def _construct(picked: Picked, name: str, settings: LinkConfig, channel: Channel) -> Backend:
    hosts = data_hosts(channel.bound, settings.advertise)
    loopback = is_loopback(channel.endpoint.address)
    if is_loopback(f"tcp://{hosts.host}:0") and not loopback:
        said = "%s is %s on this host, so no other host reaches its data; set 'advertise' to an IP address of this host"
        log.warning(said, host_of(channel.endpoint.address), hosts.host)
    context = BackendContext(
        options=picked.options,
        link=name,
        host=hosts.host,
        listen=hosts.listen,
        loopback=loopback,
        role=settings.role,
        require=frozenset(settings.require),
    )
    try:
        return picked.kind(context)
    except StatelinkError:
        raise
    except Exception as error:
        raise BackendUnavailableError(
            f"backend {picked.kind.name!r} did not start", cause=f"{type(error).__name__}: {error}"
        ) from error


def _own_handshake(
    name: str,
    settings: LinkConfig,
    backend: Backend,
    strategies: Mapping[str, Strategy],
    inventory: Inventory,
) -> Handshake:
    try:
        descriptor: object = backend.descriptor()
    except StatelinkError:
        raise
    except Exception as error:
        raise BackendUnavailableError(
            f"backend {backend.name!r} cannot say how it is reached", cause=f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(descriptor, bytes):
        raise BackendUnavailableError(
            f"backend {backend.name!r} cannot say how it is reached",
            cause=f"`descriptor` returned {descriptor!r:.60}, and not bytes",
            hint=f"tell the author of the package; `statelink conform {backend.name} -k Connecting` tests it",
            code="backend.defect",
        )
    kinds: dict[str, StateType] = {component.kind.name: component.kind for component in inventory.components}
    return Handshake(
        link=name,
        protocol=PROTOCOL,
        version=__version__,
        role=settings.role,
        backend=backend.name,
        kinds=tuple(kinds[each] for each in sorted(kinds)),
        strategies={component: strategy.name for component, strategy in strategies.items()},
        descriptor=descriptor,
        inventory=inventory,
        process=this_process(),
        verify=settings.verify,
    )
