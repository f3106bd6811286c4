"""The world of the model: processes, a network, a library and a clock, moved one small step at a time.

Everything that real processes do at once happens here one after the other, in an order that a random source chooses.
Real code runs in it: links, roles, planner, codec. After every step the engines look, and every byte that lands is
compared with who owns the memory at that moment: see `World.landing`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from statelink.backend import Side
from statelink.link import Receiving, Sending, Status
from statelink.link._exits import AtExit
from statelink.link._room_state import RoomState
from statelink.link.decode import _attaching
from statelink.link.decode._instance import Instance
from statelink.link.prefill import _decode_ranks
from statelink.link.prefill._decode_ranks import DecodeRank

from .library import AFTERLIFE, Flight
from .network import Connection, Frames, Network
from .process import PAGE, Held, Process
from .rings import Lease, lease_at, owner_of, watch, whole
from .shape import Faults, Request, Shape
from .threads import Defect
from .witness import SimWitness

if TYPE_CHECKING:
    import random

__all__ = ["World", "running"]


class World:
    """Everything there is.

    Args:
        shape: The processes.
        rng: Chooses.
        faults: What goes wrong.
    """

    DEADLINE = 8.0
    LIFETIME = 600.0
    """The configured deadline where uses of ids are counted: sides may begin one use at very different times."""
    AHEAD = 4
    """Most uses of an id that are handed out before every rank has taken up the first of them."""

    def __init__(self, shape: Shape, rng: random.Random, faults: Faults) -> None:
        self.shape = shape
        self.rng = rng
        self.faults = faults
        self.owner_fence = shape.owner_fence or shape.prompt
        self.time = 100.0
        self.network = Network()
        self.flights: list[Flight] = []
        self.everybody: dict[str, Process] = {}
        self.counts: Counter[str] = Counter()
        self.requests: list[Request] = []
        self.passes: Callable[[Frames], bool] = lambda frames: True
        """Whether the network lets a message through; for stories in which a certain one is lost or kept."""
        self._late: list[tuple[float, list[Frames], Frames]] = []
        self._uses = 0
        self.users: dict[int, Held] = {}
        self.defects: list[str] = []
        """What libraries saw that must not happen."""
        self.places: list[Process] = []
        for role, width in (("prefill", shape.prefill), ("decode", shape.decode)):
            for rank in range(width):
                self.places.append(self._start(role, (rank, width)))

    # Processes.

    def _address(self, role: str, rank: int) -> str:
        return f"tcp://127.0.0.1:{(1000 if role == 'prefill' else 2000) + rank}"

    def registered(self, name: str, *, late: bool) -> list[str]:
        """The addresses that the directory has of an instance. If it is late, one rank has moved since."""
        role = name.removeprefix("the ")
        addresses = [self._address(role, rank) for rank in range(getattr(self.shape, role))]
        if late:
            addresses[self.rng.randrange(len(addresses))] = f"tcp://127.0.0.1:{3000 + self.rng.randrange(2)}"
        return addresses

    @staticmethod
    def _other(process: Process) -> str:
        return "prefill" if process.role == "decode" else "decode"

    def siblings_of(self, process: Process) -> list[str]:
        if process.role != "decode" and not self.shape.both:
            return []
        return [self._address(process.role, rank) for rank in range(process.rank[1]) if rank != process.rank[0]]

    def _start(self, role: str, rank: tuple[int, int], model: str = "") -> Process:
        process = Process(self, role, rank, self._address(role, rank[0]), len(self.everybody), model)
        self.everybody[process.name] = process
        return process

    def living(self, role: str = "") -> list[Process]:
        return [each for each in self.places if each.alive and role in ("", each.role)]

    def kill(self, process: Process) -> None:
        """Kill a process in the middle of whatever it does."""
        if not process.alive:
            return
        self.counts["killed"] += 1
        process.alive, process.paused = False, False
        for executor in process.executors:
            executor.kill()
        for connection in self.network.connections:
            if connection.address == process.address and self.rng.random() < 0.5:
                connection.there.clear()  # what its kernel had taken is lost; what had not left yet is not
        self.network.forget(process)
        for flight in self.flights:
            if flight.mover is process:
                flight.until = self.time + self.rng.random() * AFTERLIFE
        for held in process.held.values():
            held.request.sides.pop(process.address, None)

    def restart(self, process: Process, model: str = "") -> None:
        """Another process takes its place; maybe one that serves another model, and must be refused."""
        if process.alive:
            return
        self.counts["restarted"] += 1
        self.places[self.places.index(process)] = self._start(process.role, process.rank, model)

    # Requests.

    def open(self, key: int, tokens: int) -> Request | None:
        """The router hands out a request, if it may use the id: see `REUSE`."""
        if not self.shape.reuse:
            if any(key in each.held for each in self.living()):
                return None
            for each in self.requests:
                each.over = each.over or each.key == key
        before = [each for each in self.requests if each.key == key]
        if len(before) >= self.AHEAD and len(before[-self.AHEAD].taken) < len(self.places):
            return None
        request = Request(key, len(self.requests) + 1, tokens)
        self.requests.append(request)
        self.counts["requests"] += 1
        return request

    def join(self, request: Request, process: Process) -> None:
        """The engine of one rank takes the request up."""
        if not process.alive or process.paused or request.key in process.held:
            return
        if self.shape.reuse == "counted":  # in their order, and all of them
            uses = (each for each in self.requests if each.key == request.key)
            request = next((each for each in uses if process.address not in each.taken), request)
        if process.address in request.sides or request.over:
            return
        handle: Sending | Receiving
        named: Any = {"deadline": self.DEADLINE}
        content = self._content(request, process)
        if content is not None:
            named["content"] = content
        if request.sent_by(process):
            handle = process.link.send(request.room, request.tokens, **named)
        else:
            peers = self._peers(process)
            handle = process.link.receive(request.room, peers, request.tokens, **named)
        request.taken.add(process.address)
        self._uses += 1
        held = Held(request, handle, self._uses)
        held.content = content
        self.users[held.use] = held
        self.counts["both ways"] += -request.key in process.held
        process.held[request.key] = request.sides[process.address] = held

    def _content(self, request: Request, process: Process) -> bytes | None:
        """Which request an engine has under an id."""
        if self.shape.reuse == "stated" and not self.shape.mixed:
            return f"request {request.number}".encode()
        if not self.shape.mixed:
            return None
        chance = self.rng.random()
        self.counts["mixed"] += chance < 0.1
        content: bytes | None = f"request {request.number}".encode()
        if chance < 0.1:
            # Where neither side states anything, nothing tells two requests apart: only one of the sides is silent.
            content = None if chance < 0.05 and request.sent_by(process) else f"not {request.number}".encode()
        return content

    def keep(self, request: Request | None, process: Process) -> None:
        """The engine of a rank knows a request, and has no memory for it yet."""
        if request is None or not process.alive or process.paused or request.sent_by(process):
            return
        if request.key not in process.held and process.address not in request.taken and not request.over:
            process.link.keep(request.room, self._peers(process), self.DEADLINE)
            self.counts["kept"] += 1

    def _peers(self, process: Process) -> str | list[str]:
        """What the engine of a process calls the instance that sends to it."""
        other = self._other(process)
        addresses = [self._address(other, rank) for rank in range(getattr(self.shape, other))]
        return f"the {other}" if self.shape.directory else addresses

    def advance(self, request: Request, process: Process) -> None:
        """The engine of one rank does the next thing for a request."""
        held = process.held.get(request.key)
        if held is None or process.paused or (held.request is not request and self.shape.reuse != "counted"):
            self.join(request, process)
            return
        request = held.request
        pages = -(-request.tokens // PAGE)
        if isinstance(held.handle, Sending):
            if not held.pages:
                if not process.take(held, pages):
                    return
                process.fill(held)
            if held.pushed >= request.tokens:
                return
            # One more chunk, which ends on a page or at N.
            end = min(request.tokens, held.pushed + PAGE * self.rng.randint(1, 3))
            items: dict[str, Any] = {"kv": held.pages[held.pushed // PAGE : -(-end // PAGE)]}
            if end == request.tokens:
                items["mamba"] = [held.slot]
            held.chunks.append(len(items["kv"]))
            held.handle.push(items, span=(held.pushed, end))
            held.pushed = end
        elif not held.accepted:
            prefix = request.number % (pages + 1) * PAGE
            held.prefix = prefix if prefix <= request.tokens else 0
            if not process.take(held, pages - held.prefix // PAGE):
                return
            held.accepted = True
            held.handle.accept({"kv": held.pages, "mamba": [held.slot]}, prefix=held.prefix)

    def ended(self, process: Process, held: Held) -> None:
        """An engine saw the end of a request."""
        self.counts[f"{process.role} {held.handle.status.name.lower()}"] += 1
        if held.handle.status is Status.SUCCEEDED:
            self.counts[f"{process.role} {'sent' if isinstance(held.handle, Sending) else 'received'}"] += 1
        if held.handle.reason is not None:
            self.counts[f"{process.role} {held.handle.reason.code}"] += 1

    # Bytes.

    def landing(self, flight: Flight, source: int, target: int, nbytes: int) -> None:
        """A block is about to land: both ends must still belong to the use of the room that it is for.

        Raises:
            Defect: Memory was given back while it could still be read or written.
        """
        self.counts["blocks"] += 1
        lent, use = flight.leases[flight.next], flight.uses[flight.next]
        for process, address, side, peer in (
            (flight.mover, source, 0, flight.target),
            (flight.target, target, 1, flight.mover),
        ):
            if not process.alive:
                continue
            room = process.link._decode._room(*use) if side and process.link._decode is not None else None
            if side and (room is None or room.memory.proven):
                raise Defect(f"bytes land in memory of {process.name} for room {use[0]}, which is proven to be quiet")
            if any(0 <= address - ring.memory.address < ring.memory.nbytes for ring in process.rings):
                self.counts["staged blocks"] += side
                self._own_space(process, use, lent[side], lease_at(process, address, nbytes), peer)
            else:
                process.own(address, nbytes, *use, sends=side == 0)
        if self.shape.mixed and flight.mover.alive and flight.target.alive:
            here, there = flight.mover.content_at(source, nbytes), flight.target.content_at(target, nbytes)
            if here != there:
                raise Defect(f"a byte of {here!r} lands where {there!r} is expected")

    @staticmethod
    def _own_space(
        process: Process, use: tuple[int, int], before: Lease | None, lease: Lease | None, peer: Process
    ) -> None:
        """Space of a ring must still be lent for what it was lent for when the flight began."""
        if lease is None or lease is not before:
            raise Defect(f"space of {process.name} for room {use[0]} was given back before its time")
        context = owner_of(lease)
        if (context.room, context.generation, context.peer) != (*use, peer.name):
            raise Defect(f"space of {process.name} for room {use[0]} belongs to room {context.room} of {context.peer}")

    def finish(self, flight: Flight, refusal: str = "") -> None:
        """A flight ends; one that was called failed before that has stopped by now."""
        self.flights.remove(flight)
        if flight.outcome is not None:
            flight.settle()
        elif refusal:
            flight.fail(refusal, settled=True)
        else:
            flight.succeed()

    def fly(self, flight: Flight) -> None:
        """One more block, or an end in failure."""
        target = flight.target
        if flight.until is not None and self.time > flight.until:
            self.flights.remove(flight)
        elif flight.outcome is None and self.rng.random() < self.faults.stray:
            self.counts["strays"] += 1
            flight.fail("the wire broke, says the library, and goes on", settled=False)
        elif not target.alive and (flight.outcome is not None or self.rng.random() < 10 * self.faults.stray):
            # Nobody will ever say that this one has stopped: it goes nowhere, since its target's process has ended.
            self.flights.remove(flight)
            if flight.outcome is None:
                flight.fail("the peer is gone", settled=False)
        elif not target.alive or self.rng.random() < self.faults.transfer:
            self.finish(flight, "the peer is gone" if not target.alive else "the wire broke")
        else:
            target.backend.land(flight)

    # Time and order.

    def _deliver(self, connection: Connection, queue: list[Frames], to: Process) -> None:
        place = self.rng.randrange(len(queue)) if self.rng.random() < self.faults.reorder else 0
        frames = queue.pop(place)
        if not self.passes(frames):
            return
        if self.rng.random() < self.faults.repeat:
            self._late.append((self.time + 4 * self.rng.random(), queue, frames))
        if self.rng.random() < self.faults.drop:
            self.counts["dropped"] += 1
            return
        self.counts["delivered"] += 1
        to.channel.inbox.append((connection, frames))
        to.loop.receive(0.0)

    def choices(self) -> list[Callable[[], None]]:
        """Everything that could happen next without time passing."""
        found: list[Callable[[], None]] = []
        for connection, queue, to in self.network.deliverable():
            found.append(lambda c=connection, q=queue, t=to: self._deliver(c, q, t))  # type: ignore[misc]
        for process in self.places:
            if not process.alive or process.paused:
                continue
            if process.loop.can_run():
                found.append(process.loop.run_posted)
            if process.loop.timer_due():
                found.append(process.loop.run_timer)
            for executor in process.executors:
                found += [lambda each=executor, key=key: each.step(key) for key in executor.choices()]  # type: ignore[misc]
        slow = self.faults.slow
        flying = [each for each in self.flights if not slow or self.rng.random() >= slow]
        found += [lambda each=each: self.fly(each) for each in flying]  # type: ignore[misc]
        return found

    def step(self) -> None:
        """Let one thing happen, and let the engines look."""
        self.counts["steps"] += 1
        if self._late and self._late[0][0] <= self.time:
            _, queue, frames = self._late.pop(0)
            queue.append(frames)
        found = self.choices()
        if found and self.rng.random() > 0.02:
            self.rng.choice(found)()
        else:
            self._pass_time(busy=bool(found))
        for process in self.places:
            if process.alive and not process.paused:
                process.look()
        if self.defects:
            raise Defect(self.defects[0])

    def _pass_time(self, *, busy: bool) -> None:
        if busy:
            self.time += self.rng.random() * 0.02
            return
        awake = [each for each in self.living() if not each.paused]
        timers = [due for each in awake if (due := each.loop.next_timer()) is not None]
        timers += [free for each in awake for executor in each.executors if (free := executor.next_free()) is not None]
        self.time = max(self.time, min(timers, default=self.time)) + 0.001

    def until(self, done: Callable[[], bool], seconds: float = 60.0) -> None:
        """Go on until something is true."""
        end = self.time + seconds
        while not done():
            assert self.time < end, "it never came"
            self.step()

    def settle(self) -> None:
        """The faults end, everybody who is dead comes back, and time passes until everything has come to an end.

        Raises:
            Defect: Something has not.
        """
        self.faults = Faults()
        self.shape = self.shape._replace(mixed=False)
        self.network.cut.clear()
        for process in list(self.places):
            process.paused = False
            if process.model:
                self.kill(process)
            self.restart(process)
        end = self.time + self.DEADLINE + 10
        while self.time < end:
            self.step()
        self._check_ended()
        self._check_serving()

    def _check_ended(self) -> None:
        for process in self.places:
            for held in process.held.values():
                if held.ended is None:
                    raise Defect(f"{process.name}: {held.request} has not ended: {held.handle!r}")
                if self._must_quiesce(process, held):
                    raise Defect(f"{process.name}: {held.request} has not quiesced: {held.handle!r}")

    def _must_quiesce(self, process: Process, held: Held) -> bool:
        """Without an owner's fence, memory that a process wrote to that was killed stays in quarantine."""
        if self.shape.staged:
            return True  # the end of a process can be told
        if isinstance(held.handle, Sending):
            unsure = [
                name for name, delivery in held.handle._state._deliveries.items() if delivery.in_flight.on(Side.SOURCE)
            ]
            return all(self.everybody[name].alive for name in unsure)
        if self.owner_fence:
            return True
        assert isinstance(held.handle, Receiving)
        names = [name for name, delivery in held.handle._state._deliveries.items() if not delivery.in_flight.drained]
        return all(self.everybody[name].alive for name in names)

    def _check_serving(self) -> None:
        """Whatever happened, the next request is served."""
        for direction in (1, -1) if self.shape.both else (1,):
            opened = (self.open(direction * room, 5) for room in range(1000, 1100))
            request = next(each for each in opened if each is not None)
            self._serve(request)
        self._check_rings()
        for process in self.places:
            kept = [room for state, room in process.link._table.all() if state.over]
            if kept:
                raise Defect(f"{process.name} keeps {kept}")

    def _serve(self, request: Request) -> None:
        """A request succeeds.

        Raises:
            Defect: It does not.
        """
        end = self.time + self.DEADLINE + 30
        while self.time < end and not all(
            (held := request.sides.get(process.address)) and held.ended for process in self.places
        ):
            for process in self.places:
                held = request.sides.get(process.address)
                if held is None or held.ended is None:
                    self.advance(request, process)
            for _ in range(20):
                self.step()
        for process in self.places:
            held = request.sides[process.address]
            if held.ended is not Status.SUCCEEDED:
                raise Defect(f"{process.name} does not serve any more: {held.handle!r}: {held.handle.reason}")

    def _check_rings(self) -> None:
        """However rooms ended, all space has come back, nobody waits for any, and nobody may write to it."""
        rings = [(process, ring) for process in self.places for ring in process.rings]
        for _ in range(5000):
            kept = [f"{process.name} keeps {ring.snapshot()}" for process, ring in rings if not whole(ring)]
            kept += [f"{each.name} follows {rooms}" for each in self.places if (rooms := each.link._table.unproven())]
            kept += [f"{process.name} still grants {keys}" for process in self.places if (keys := process.backend.open)]
            if not kept:
                return
            self.step()
        raise Defect("; ".join(kept))


@contextmanager
def running(steps: Counter[tuple[object, object]] | None = None, ends: Counter[str] | None = None) -> Iterator[None]:
    """Processes see the world's witnesses, and what happens is counted.

    Args:
        steps: Counts the steps that were taken in the tables: (where from, event or status).
        ends: Counts how far staging was when a room failed.
    """

    def counted(kind: Any, method: str, of: Callable[[Any], object]) -> Any:
        original = getattr(kind, method)

        def call(self: Any, event: object, *args: Any) -> Any:
            before = of(self)
            taken = original(self, event, *args)
            if taken and steps is not None:
                steps[before, event] += 1
            return taken

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AtExit, "note", lambda link: None)  # no thread is behind a link here, and nothing closes it
        patch.setattr(_attaching, "Witness", SimWitness)
        patch.setattr(_decode_ranks, "Witness", SimWitness)
        watch(patch, Counter() if ends is None else ends)
        patch.setattr(Instance, "step", counted(Instance, "step", lambda each: each.state))
        patch.setattr(DecodeRank, "step", counted(DecodeRank, "step", lambda each: each.state))
        patch.setattr(RoomState, "step", counted(RoomState, "step", lambda each: each.status))
        yield
