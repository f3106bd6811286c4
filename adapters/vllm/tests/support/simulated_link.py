"""Links without threads: a room goes on only when the test lets it, cell by cell, in whatever order the test chooses.

A link here has the methods of `statelink.Link` that the connector calls. What it moves are cells of `Memory`, between
positions that `statelink.plan` names.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from statelink import Pages, Status
from statelink.errors import Reason, RoomError
from statelink.plan import held_items, required_span

if TYPE_CHECKING:
    from statelink.state import Component, Inventory

__all__ = ["Event", "Memory", "Network", "SimulatedLink", "SimulatedRoom"]

Event = tuple[str, Callable[[], None]]
"""What can happen next: its kind, and what does it."""

Cell = tuple[str, int, int]
"""A component, the number of an item in the request, and a layer."""

Part = tuple["Component", int, int, int]
"""A component, a layer, and a range of positions."""

ENDED = (Status.SUCCEEDED, Status.FAILED)

Place = tuple[int, int]
"""A layer, and a token in a block."""

STATE = 0
"""The place of a recurrent state in its block."""


class Memory:
    """A rank's blocks. A block belongs to one group of layers at a time; a cell holds what was computed for a token."""

    def __init__(self) -> None:
        self._owner: dict[int, int] = {}
        self._cells: dict[tuple[int, Place], Any] = {}

    def clear(self, block: int) -> None:
        for place in [place for place in self._cells if place[0] == block]:
            del self._cells[place]

    def write(self, group: int, block: int, place: Place, value: Any) -> None:
        assert block, "something is written to the null block"
        if self._owner.get(block) != group:
            self.clear(block)
            self._owner[block] = group
        if value is None:
            self._cells.pop((block, place), None)
        else:
            self._cells[block, place] = value

    def read(self, group: int, block: int, place: Place) -> Any:
        assert block, "the null block is read"
        return self._cells.get((block, place)) if self._owner.get(block) == group else None

    def copy(self, source: int, target: int) -> None:
        self.clear(target)
        self._owner[target] = self._owner.get(source, -1)
        for block, place in list(self._cells):
            if block == source:
                self._cells[target, place] = self._cells[source, place]


class Push(NamedTuple):
    """One call of `SimulatedRoom.push` on prefill.

    Attributes:
        items: By component and number of an item in the request, the item.
        ready: The event after which it may be read.
        layers: ``[first, last)`` of the layers of which it has the items; ``None`` for all.
    """

    items: dict[tuple[str, int], int]
    ready: Any = None
    layers: tuple[int, int] | None = None

    def has(self, cell: Cell) -> bool:
        """Whether it has an item of a layer."""
        name, number, layer = cell
        return (name, number) in self.items and (self.layers is None or self.layers[0] <= layer < self.layers[1])


class SimulatedRoom:
    """One side of a request, with the attributes of `statelink.Room` that the connector reads."""

    def __init__(
        self, link: SimulatedLink, room: int, tokens: int, prefix: int = 0, content: bytes | None = None
    ) -> None:
        self.link, self.room, self.tokens, self.held, self.content = link, room, tokens, prefix, content
        self.status, self.quiesced = Status.WAITING, True
        self.reason: Reason | None = None
        self.pushes: list[Push] = []
        """What this side has named: on decode at once, on prefill in parts."""
        self.complete: bool = False
        """Whether the last part was named."""
        self._settled = 0
        self.given_up = ""
        self.deadline: float | None = None
        """Seconds that the engine gave it last."""
        self.left: dict[SimulatedRoom, list[Part]] = {}
        """For each room of prefill that writes to this one, what it has not written."""
        self.nbytes: dict[str, int] = {}

    def wait(self, timeout: float, *, quiesced: bool) -> Status:
        return self.status  # nothing ends here while somebody waits

    @property
    def prefix(self) -> int | None:
        """What decode holds; on prefill, once all of decode's ranks have asked."""
        if self in self.link.network.rooms["receive"]:
            return self.held
        targets = self.link.network.targets(self)
        return targets[0].held if targets else None

    def push(
        self,
        items: Mapping[str, Any],
        *,
        span: tuple[int, int] | None = None,
        layers: tuple[int, int] | None = None,
        ready: Any = None,
        last: bool = True,
    ) -> None:
        if self.status in ENDED:
            return
        assert not self.complete, "a room is pushed to after its last push"
        if layers is not None:
            self.link.network.refuse()
        first, end = span or (0, self.tokens)
        assert not last or end == self.tokens, "the last push does not reach the end"
        made = Push({}, ready, layers)
        for component in self.link.inventory.components:
            if component.name in items:
                for number, item in self._numbered(component, items[component.name], first, end).items():
                    made.items[component.name, number] = item
                    cells = [cell for cell in _cells(component, number) if made.has(cell)]
                    assert not any(each.has(cell) for each in self.pushes for cell in cells), "it is pushed twice"
        self.complete, self.quiesced = last, False
        self.pushes.append(made)

    def _numbered(self, component: Component, given: Any, first: int, last: int) -> dict[int, int]:
        """Items by their number in the request."""
        ids = [int(item) for item in (given.ids if isinstance(given, Pages) else given)]
        if not component.page:
            assert last == self.tokens, "a recurrent state is sent before the prompt's end"
            return dict(enumerate(ids))
        begin, end = required_span(component, self.tokens, self.held)
        begin, end = held_items(component, self.tokens, (max(begin, first), min(end, last)))
        if isinstance(given, Pages):
            assert begin <= given.start // component.page
            begin = given.start // component.page
        assert len(ids) == end - begin, f"{len(ids)} items of {component.name} are named, and {end - begin} are needed"
        return dict(enumerate(ids, begin))

    def blocks_read(self) -> set[int]:
        """Blocks that something may still read."""
        pushes = [] if self.quiesced else self.pushes[self.settled :]
        return {item for each in pushes for item in each.items.values()}

    def push_of(self, cell: Cell) -> Push | None:
        """The push that has an item of a layer."""
        return next((each for each in self.pushes if each.has(cell)), None)

    @property
    def settled(self) -> int:
        """How many pushes nothing reads any more."""
        if self.status in ENDED:
            return len(self.pushes) if self.quiesced else self._settled
        targets, left = self.link.network.targets(self), set()
        for target in targets:
            left |= {self.cell_of(*part[:3]) for part in target.left_of(self)}
        while targets and self._settled < len(self.pushes) and not any(map(self.pushes[self._settled].has, left)):
            self._settled += 1
        return self._settled

    def cell_of(self, theirs: Component, layer: int, position: int) -> Cell:
        """What holds a position, by the other side's component."""
        component = next(each for each in self.link.inventory.components if each.name == theirs.name)
        return component.name, position // component.page if component.page else 0, layer

    def readable(self, component: Component, layer: int, position: int) -> bool:
        """Whether the item that holds a position was pushed, and is computed."""
        push = self.push_of(self.cell_of(component, layer, position))
        return push is not None and (push.ready is None or push.ready.query())

    def left_of(self, source: SimulatedRoom) -> list[Part]:
        """What a room of prefill has not written to this one."""
        if source not in self.left:
            self.left[source] = list(self.link.network.parts(source, self))
        return self.left[source]

    def extend(self, seconds: float) -> None:
        assert seconds > 0
        self.deadline = seconds

    def abort(self, why: str = "") -> None:
        if self.status not in ENDED:
            self.given_up = why or "aborted"

    @property
    def claimed(self) -> bool:
        network = self.link.network
        return self.room in network.kept or any(each.room == self.room for each in network.rooms["receive"])

    def abort_unclaimed(self, why: str) -> None:
        if not self.claimed:
            self.abort(why)

    def end(self, why: str = "", *, quiet: bool = True) -> None:
        assert self.settled >= 0  # what has settled by now stays so
        self.status = Status.FAILED if why else Status.SUCCEEDED
        self.reason = Reason("room.aborted", why) if why else None
        self.quiesced = quiet or self.quiesced

    @property
    def report(self) -> Any:
        moved = {name: SimpleNamespace(nbytes=count) for name, count in self.nbytes.items()}
        return SimpleNamespace(transferred=0.001, moved=moved)


class SimulatedLink:
    """What `statelink.open` returns here."""

    def __init__(self, network: Network, engine: Any, rank: int, inventory: Inventory) -> None:
        self.network, self.engine, self.rank, self.inventory = network, engine, rank, inventory
        self.address = f"tcp://127.0.0.1:{len(network.links) + 1}"
        network.links.append(self)

    def send(
        self, room: int, tokens: int, *, deadline: float | None = None, content: bytes | None = None
    ) -> SimulatedRoom:
        made = self.network.add("send", SimulatedRoom(self, room, tokens, content=content))
        made.deadline = deadline
        return made

    def receive(
        self,
        room: int,
        peer: Any,
        tokens: int,
        items: Mapping[str, Any],
        *,
        prefix: int = 0,
        ready: Any = None,
        content: bytes | None = None,
    ) -> SimulatedRoom:
        assert content, "prefill could not tell another request from this one"
        made = SimulatedRoom(self, room, tokens, prefix, content)
        made.push(items)
        return self.network.add("receive", made)

    def decline(self, room: int, peer: Any, why: str = "") -> None:
        self.network.declined.add((room, self))

    def keep(self, room: int, peer: Any, seconds: float) -> None:
        assert seconds > 0
        received = [each for each in self.network.rooms["receive"] if each.room == room and each.link is self]
        assert not received, "prefill is asked to keep what has been asked for"
        assert (room, self) not in self.network.declined, "prefill is asked to keep what was declined"
        self.network.kept.add(room)

    def siblings(self, addresses: Sequence[str]) -> None:
        assert self.address not in addresses

    def close(self) -> bool:
        return True


class Network:
    """All rooms of all links, and what can happen to them."""

    def __init__(self) -> None:
        self.links: list[SimulatedLink] = []
        self.rooms: dict[str, list[SimulatedRoom]] = {"send": [], "receive": []}
        self.declined: set[tuple[int, SimulatedLink]] = set()
        self.kept: set[int] = set()
        self.refused = 0
        """One push of layers in so many is one too many; 0 if none is."""
        self._layered = itertools.count(1)

    def refuse(self) -> None:
        """Raise an error where a push of layers is one too many."""
        if self.refused and next(self._layered) % self.refused == 0:
            raise RoomError("a room is pushed faster than pushes are moved", code="room.pushes")

    def add(self, side: str, room: SimulatedRoom) -> SimulatedRoom:
        for other in self.rooms["send" if side == "receive" else "receive"]:
            assert other.room != room.room or None in (other.content, room.content) or other.content == room.content
        self.rooms[side].append(room)
        for sending in self.rooms["send"]:
            asked = any(each.room == sending.room for each in self.rooms["receive"])
            if sending.status in (Status.BOOTSTRAPPING, Status.WAITING):
                sending.status = Status.WAITING if asked else Status.BOOTSTRAPPING
        return room

    def events(self, *, kind: bool = False) -> list[Event]:
        """What can happen next.

        Args:
            kind: Leave out what makes an honest request fail.
        """
        found: list[Event] = []
        for room in self.rooms["receive"]:
            found += self._of_decode(room, kind)
        for room in self.rooms["send"]:
            found += self._of_prefill(room, kind)
        return found

    # Decode.

    def _of_decode(self, room: SimulatedRoom, kind: bool) -> Iterator[Event]:
        active = room.status not in ENDED
        sources = self._sources(room) if active or not room.quiesced else []
        for source in sources:
            if source.pushes and (active or not kind) and not source.quiesced:
                for part in room.left_of(source):
                    if source.readable(*part[:3]):
                        yield "write", functools.partial(self._write, room, source, part)
                        break
        complete = len(sources) == self._fan_in(room, sources) and all(
            source.complete and not room.left_of(source) and source.status is not Status.FAILED for source in sources
        )
        if active and complete and not room.given_up:
            yield "arrive", lambda: room.end()
        lost = not sources or any(source.status is Status.FAILED for source in sources)
        if active and (not kind or room.given_up or (lost and not complete)):
            yield "fail", lambda: room.end(room.given_up or "prefill was lost", quiet=False)
            if not kind:
                yield "fail quietly", lambda: room.end(room.given_up or "prefill was lost")
        if not room.quiesced and room.status in ENDED:
            yield "calm", lambda: setattr(room, "quiesced", True)

    def _sources(self, room: SimulatedRoom) -> list[SimulatedRoom]:
        rank, width = room.link.rank, room.link.inventory.ranks
        found = []
        for each in self.rooms["send"]:
            if each.room == room.room and each.link.engine is not room.link.engine:
                count = each.link.inventory.ranks
                first, last = rank * count // width, max((rank + 1) * count // width, rank * count // width + 1)
                if first <= each.link.rank < last:
                    found.append(each)
        return found

    @staticmethod
    def _fan_in(room: SimulatedRoom, sources: Sequence[SimulatedRoom]) -> int:
        return max(sources[0].link.inventory.ranks // room.link.inventory.ranks, 1) if sources else 1

    @staticmethod
    def parts(source: SimulatedRoom, target: SimulatedRoom) -> Iterator[Part]:
        theirs = {each.name: each for each in source.link.inventory.components}
        for component in target.link.inventory.components:
            item = sum(buffer.layout.held for buffer in component.buffers)
            if not component.page:
                target.nbytes[component.name] = item
                for _, _, layer in _cells(component, 0):
                    yield component, layer, 0, 1
                continue
            first, last = required_span(component, target.tokens, target.held)
            step = math.gcd(component.page, theirs[component.name].page)
            target.nbytes[component.name] = 0
            if first < last:
                first, last = first - first % step, -(-last // step) * step
                target.nbytes[component.name] = (last - first) * item // component.page
            for at in range(first, last, step):
                for _, _, layer in _cells(component, 0):
                    yield component, layer, at, at + step

    def _write(self, room: SimulatedRoom, source: SimulatedRoom, part: Part) -> None:
        """A part of prefill's state arrives in decode's memory. Both must still hold it."""
        component, layer, first, last = part
        room.left[source].remove(part)
        for position in range(first, last):
            group, block, place = _place(source, component, layer, position)
            source.link.engine.check_read(block)
            value = source.link.engine.memories[source.link.rank].read(group, block, place)
            group, block, place = _place(room, component, layer, position)
            room.link.engine.check_written(room, block)
            room.link.engine.memories[room.link.rank].write(group, block, place, value)

    # Prefill.

    def _of_prefill(self, room: SimulatedRoom, kind: bool) -> Iterator[Event]:
        if room.status not in ENDED:
            targets = [each for each in self.rooms["receive"] if room in self._sources(each)]
            refused = any((room.room, link) in self.declined for link in self.links)
            if refused or (targets and all(each.status is Status.SUCCEEDED for each in targets)):
                yield "accepted", lambda: room.end()
            lost = not targets or any(each.status is Status.FAILED for each in targets)
            if not kind or room.given_up or (lost and not refused):
                yield "give up", lambda: room.end(room.given_up or "decode was lost", quiet=False)
        elif not room.quiesced:
            yield "stop", lambda: setattr(room, "quiesced", True)

    def targets(self, room: SimulatedRoom) -> list[SimulatedRoom]:
        """The rooms of decode's ranks that a room of prefill writes to; none before all of them have asked."""
        found = [each for each in self.rooms["receive"] if room in self._sources(each)]
        width = found[0].link.inventory.ranks // room.link.inventory.ranks if found else 0
        return found if len(found) >= max(width, 1) else []


def _cells(component: Component, number: int) -> list[Cell]:
    """An item of each layer of a component."""
    return [(component.name, number, layer) for layer in sorted({buffer.layer or 0 for buffer in component.buffers})]


def _place(room: SimulatedRoom, theirs: Component, layer: int, position: int) -> tuple[int, int, Place]:
    """The group, the block and the place in it that hold a position of a layer on one side of a room."""
    name, number, _ = cell = room.cell_of(theirs, layer, position)
    push = room.push_of(cell)
    assert push is not None, f"position {position} of {name} is in no item that is named"
    component = next(each for each in room.link.inventory.components if each.name == name)
    inside = position % component.page if component.page else STATE
    return room.link.engine.group_of(name), push.items[name, number], (layer, inside)
