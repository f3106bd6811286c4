"""One process of the model: a real link over simulated parts, and the engine that uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from statelink import state
from statelink.backend import BackendContext, Strategy
from statelink.config import LinkConfig
from statelink.errors import PeerError
from statelink.link import Context, Link, Receiving, Sending, StaticRendezvous, Status
from statelink.link.decode._in_flight import Proof
from statelink.opening import choose_staging, open_strategies
from statelink.opening._open import _own_handshake
from statelink.registry import plugin_manager

from .library import MoverBackend, OwnerBackend, PromptBackend, SimBackend
from .network import SimChannel
from .rings import Lease, WatchedMemory, owner_of, rings_of, staging
from .threads import Defect, SimExecutor, SimLoop
from .witness import witnessed

if TYPE_CHECKING:
    from statelink.link import Peer
    from statelink.link.runtime import KeyOrder
    from statelink.wire import Endpoint

    from .shape import Request
    from .world import World

__all__ = ["PAGE", "PAGES", "SLOTS", "WIDTH", "Held", "Process"]

PAGE, PAGES, SLOTS, WIDTH = 2, 24, 8, 4
"""Tokens of a page, pages and slots of a pool, bytes of a token or row."""
FREE = -1
TAKE_BACK_SECONDS = 0.02
"""Where memory is taken back without proof, every other process has this option ``take_back_after``."""

Pool = npt.NDArray[np.uint8]


class SimRendezvous(StaticRendezvous):
    """Addresses stand for themselves, and a name for those that the world says, once the server has them."""

    def __init__(self, world: World) -> None:
        super().__init__({})
        self._world = world

    def resolve(self, peer: Peer) -> tuple[Endpoint, ...] | None:
        chance = self._world.rng.random()
        if chance < self._world.faults.connect:
            raise PeerError("no such instance", code="peer.unknown")
        if chance < 2 * self._world.faults.connect:
            return None
        if isinstance(peer, str) and not peer.startswith("tcp://"):
            peer = self._world.registered(peer, late=chance < 5 * self._world.faults.connect)
        return super().resolve(peer)


class Held:
    """What the engine of one process holds for one request.

    Attributes:
        use: Unique number: whose memory it is.
        pages: Its pages, in order of position.
        chunks: How many of its pages each push named, for those that have not settled yet.
        settled: How many pushes have settled.
        freed: How many of its pages were freed, because the pushes that named them have settled.
        slot: Its slot.
        ended: The status that was seen last, if it is an end.
        reason: The reason that was seen first.
        content: Which request it is, as its engine states it; ``None`` if it states nothing.
    """

    content: bytes | None = None

    def __init__(self, request: Request, handle: Sending | Receiving, use: int) -> None:
        self.request = request
        self.handle = handle
        self.use = use
        self.pages: list[int] = []
        self.chunks: list[int] = []
        self.settled = 0
        self.freed = 0
        self.slot = FREE
        self.prefix = 0
        self.pushed = 0
        self.accepted = False
        self.ended: Status | None = None
        self.reason: Any = None
        self.released = False
        self.last = Status.BOOTSTRAPPING


class Process:
    """A rank, from its start to its end.

    Args:
        world: The world.
        role: Its instance: ``prefill`` or ``decode``. Its link has this role, or both.
        rank: Rank and number of ranks of its instance.
        address: Where it listens; a later process may take its place.
        number: Counts all processes ever started.
        model: What it serves; those that work together serve the same.
    """

    def __init__(self, world: World, role: str, rank: tuple[int, int], address: str, number: int, model: str) -> None:
        self.world = world
        self.role = role
        self.model = model
        self.number = number
        self.rank = rank
        self.address = address
        self.name = f"{role}.{rank[0]}-{number}"
        self.paused = False
        self.alive = True
        self.skew = 0.0
        self.executors: list[SimExecutor] = []
        self.held: dict[int, Held] = {}
        layers = [rank[0]] if role == "prefill" and rank[1] > 1 else [0, 1]
        self.kv: dict[int, Pool] = {layer: np.full((PAGES, PAGE, WIDTH), 255, np.uint8) for layer in layers}
        self.rows: dict[int, Pool] = {layer: np.full((SLOTS, WIDTH), 255, np.uint8) for layer in layers}
        self.page_owner = [FREE] * PAGES
        self.slot_owner = [FREE] * SLOTS
        self.link = self._open()

    def _open(self) -> Link:
        world = self.world
        rows = {f"layers.{layer}": rows for layer, rows in self.rows.items()}
        layers = {f"layers.{layer}": layer for layer in self.rows}
        slots = state.whole_items(rows, type="mamba", layers=layers, replicated=True)
        inventory = state.describe(
            f"the {self.role}",
            [state.mla_pages(self.kv), slots],
            rank=self.rank[0],
            ranks=self.rank[1],
            model=self.model,
        )
        settings = LinkConfig(
            role="both" if world.shape.both else self.role,  # type: ignore[arg-type]
            backend="sim",
            siblings=tuple(world.siblings_of(self)),
            deadline=world.LIFETIME if world.shape.reuse == "counted" else world.DEADLINE,
            heartbeat=0.5,
            liveness=2.0,
            take_back_after=TAKE_BACK_SECONDS if world.shape.takes_back and self.number % 2 else None,
            inspect=False,
        )
        channel: Any = SimChannel(world.network, self)
        self.channel: SimChannel = channel
        kind: type[SimBackend] = OwnerBackend if world.owner_fence else MoverBackend
        if world.shape.prompt:
            kind = PromptBackend
        backend = kind(BackendContext(options=(world, self), link=self.name))
        self.backend: SimBackend = backend
        direct: dict[str, Strategy] = {component.name: backend.strategies["*"] for component in inventory.components}
        strategies = choose_staging(direct, kind, staging(world.shape.staged, world.shape.ring, direct), settings.role)
        inventory = open_strategies(strategies, inventory, ExitStack())
        self.rings = rings_of(strategies)
        for ring in self.rings:
            ring.memory = WatchedMemory(ring.memory, self)
        card = _own_handshake(self.name, settings, backend, strategies, inventory)
        if world.shape.staged:
            card = msgspec.structs.replace(card, process=witnessed(self))
        self.loop = SimLoop(self)

        def executor(name: str, width: int, spare: int, order: KeyOrder) -> SimExecutor:
            return SimExecutor(self, name, width, spare, order)

        self.context = Context(
            settings,
            channel,
            backend,
            card,
            strategies,
            SimRendezvous(world),
            plugin_manager(),
            loop=self.loop,
            make_executor=executor,
        )
        world.network.listening[self.address] = self
        return Link(self.context)

    def now(self) -> float:
        """What this process's clock says; never goes back."""
        return self.world.time + self.skew

    # What the world asks.

    def own(self, address: int, nbytes: int, room: int, generation: int, *, sends: bool) -> None:
        """See that memory of a pool belongs to this use of a room.

        Raises:
            Defect: It was given back while it could still be read or written.
        """
        for use in self._owners(address, nbytes):
            held = self.world.users.get(use)
            right = held is not None and held.request.room == room and held.request.sent_by(self) == sends
            if right and held is not None and isinstance(held.handle, Receiving):
                right = held.handle._state.generation == generation
            if not right:
                owner = held.request if held is not None else "nobody"
                raise Defect(f"memory of {self.name} for room {room} belongs to {owner}")

    def content_at(self, address: int, nbytes: int) -> bytes | None:
        """What the engine states of the request to which memory of a pool belongs."""
        return self.world.users[next(iter(self._owners(address, nbytes)))].content

    def use_at(self, address: int, nbytes: int, lease: Lease | None) -> tuple[int, int]:
        """Room and generation of the request that receives into these bytes; zeros if none does."""
        if lease is not None:
            context = owner_of(lease)
            return context.room, context.generation
        held = self.world.users.get(next(iter(self._owners(address, nbytes))))
        if held is None or not isinstance(held.handle, Receiving):
            return 0, 0
        return held.request.room, held.handle._state.generation

    def _owners(self, address: int, nbytes: int) -> Iterator[int]:
        for pools, owners in ((self.kv, self.page_owner), (self.rows, self.slot_owner)):
            for pool in pools.values():
                low = pool.ctypes.data
                if low <= address < low + pool.nbytes:
                    size = pool.nbytes // len(pool)
                    first, last = (address - low) // size, (address + nbytes - 1 - low) // size
                    yield from owners[first : last + 1]
                    return
        raise Defect(f"{nbytes} bytes at {address:#x} are not memory of {self.name}")

    # The engine.

    def take(self, held: Held, pages: int) -> bool:
        """Allocate memory for a request, if there is enough: any that is free, in any order."""
        free = [page for page, owner in enumerate(self.page_owner) if owner == FREE]
        slots = [slot for slot, owner in enumerate(self.slot_owner) if owner == FREE]
        if len(free) < pages or not slots:
            return False
        held.pages = self.world.rng.sample(free, pages)
        held.slot = self.world.rng.choice(slots)
        for page in held.pages:
            self.page_owner[page] = held.use
        self.slot_owner[held.slot] = held.use
        return True

    def release(self, held: Held) -> None:
        """Free a request's memory; whoever takes it next must find it undisturbed."""
        if held.released:
            return
        held.released = True
        self._free_pages(held, len(held.pages) - held.freed)
        if held.slot != FREE:
            self.slot_owner[held.slot] = FREE
            for rows in self.rows.values():
                rows[held.slot] = 254

    def _free_pages(self, held: Held, count: int) -> None:
        """Free the next pages of a request."""
        for page in held.pages[held.freed : held.freed + count]:
            self.page_owner[page] = FREE
            for pool in self.kv.values():
                pool[page] = 254
        held.freed += count

    def _settle(self, held: Held, handle: Sending) -> None:
        """Free the pages of pushes that have settled, although the room may go on.

        Raises:
            Defect: The count went back, or counts a push that was not made.
        """
        settled = handle.settled
        if not held.settled <= settled <= held.settled + len(held.chunks):
            raise Defect(f"{self.name}: {held.request} has settled {settled} pushes, {held.settled} before")
        if handle.status not in (Status.FAILED, Status.SUCCEEDED):
            self.world.counts["settled early"] += settled - held.settled
        for _ in range(settled - held.settled):
            self._free_pages(held, held.chunks.pop(0))
        held.settled = settled

    def fill(self, held: Held) -> None:
        """Prefill computes the request's state."""
        for layer, pool in self.kv.items():
            for position in range(held.request.tokens):
                pool[held.pages[position // PAGE], position % PAGE] = held.request.bytes_at(layer, position)
            self.rows[layer][held.slot] = held.request.bytes_at(layer, -1)

    def verify(self, held: Held) -> None:
        """Decode has everything that it was promised.

        Raises:
            Defect: It has not.
        """
        for layer, pool in self.kv.items():
            for position in range(held.prefix, held.request.tokens):
                page = held.pages[(position - held.prefix) // PAGE]
                found = pool[page, position % PAGE].tobytes()
                if found != held.request.bytes_at(layer, position).tobytes():
                    raise Defect(f"{self.name}: {held.request} succeeded without position {position}: {found!r}")
            if self.rows[layer][held.slot].tobytes() != held.request.bytes_at(layer, -1).tobytes():
                raise Defect(f"{self.name}: {held.request} succeeded without its slot")

    def _check_unasked(self, handle: Sending | Receiving) -> None:
        """See that memory is not free while it is granted to a rank that was never asked, unless that rank says so.

        Raises:
            Defect: It is.
        """
        if isinstance(handle, Receiving) and not handle.taken_back:
            room, generation = handle.room, handle._state.generation
            for name, delivery in handle._state._deliveries.items():
                silent = not delivery.in_flight.asked and delivery.in_flight.proof is not Proof.DRAINED
                if silent and (name, room, generation) in self.backend.open:
                    raise Defect(f"{self.name}: memory of room {room} is free, and granted to {name}")

    def look(self) -> None:
        """What a scheduler does in every turn: see what became of its requests.

        Raises:
            Defect: A rule of the lifecycle is broken.
        """
        for number, held in list(self.held.items()):
            if isinstance(held.handle, Sending):
                self._settle(held, held.handle)
            status, reason = held.handle.status, held.handle.reason
            if held.ended is not None and status is not held.ended:
                raise Defect(f"{self.name}: {held.request} ended twice: {held.ended.name}, then {status.name}")
            if held.reason is not None and reason != held.reason:
                raise Defect(f"{self.name}: {held.request} changed its reason")
            if (status is Status.FAILED) != (reason is not None):
                raise Defect(f"{self.name}: {held.request} is {status.name} with reason {reason}")
            if status > Status.FAILED and status < held.last:
                raise Defect(f"{self.name}: {held.request} went back from {held.last.name} to {status.name}")
            held.last, held.reason = status, reason
            if held.ended is None and status in (Status.FAILED, Status.SUCCEEDED):
                held.ended = status
                self.world.ended(self, held)
                if status is Status.SUCCEEDED and isinstance(held.handle, Receiving):
                    self.verify(held)
            if held.ended is not None and held.handle.quiesced:
                by = "engine" if self.context.config.take_back_after is None else "operator"
                self.world.counts[f"taken back by the {by}"] += held.handle.taken_back
                self._check_unasked(held.handle)
                self.release(held)
                del self.held[number]
