"""Rooms of requests whose prompt is still being computed: a worker's side.

A step that computes a part of a prompt pushes it by groups of layers, each as soon as it is launched. Where vLLM tells
of no layer, as in a step that is a single graph, all of it is pushed when the step is launched.

A part waits here until decode has asked for the request. What waits here can be withdrawn, and nothing reads it. What
was pushed is read, whatever becomes of the request meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from statelink import Pages, Status, layer_groups
from statelink.errors import StatelinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from statelink import Link, Sending

    from ._inventory import Group
    from ._messages import Chunk, Open, Send

__all__ = ["EarlyRoom", "EarlyRooms"]

log = logging.getLogger("vllm.statelink")

ENDED = (Status.SUCCEEDED, Status.FAILED)
EXTENSION_SECONDS = 10.0
"""Most seconds between two extensions of a room whose prompt is still being computed."""
FEW_ROOMS = 4
"""Rooms of a step of which each group of layers leaves by itself, even where those before it have not arrived."""


class _Order(NamedTuple):
    """The layers of some components.

    Attributes:
        ends: When the layers up to one of these numbers are launched, they are pushed.
        end: One more than the largest number.
    """

    ends: frozenset[int]
    end: int


class _Part:
    """A part of a prompt that is not wholly pushed.

    Attributes:
        chunk: What the scheduler said of it.
        order: Its layers.
        launched: Whether all of it is launched.
        ready: The event after which all of it is computed.
        done: Layers below this number were pushed.
        layered: What is pushed of each component by layers; ``None`` before the first push.
        rest: What is pushed of the others, behind all layers.
    """

    def __init__(self, chunk: Chunk, order: _Order) -> None:
        self.chunk = chunk
        self.order = order
        self.launched = False
        self.ready: Any = None
        self.done = 0
        self.layered: dict[str, Any] | None = None
        self.rest: dict[str, Any] = {}


class EarlyRoom:
    """The room of one request.

    Attributes:
        room: It.
        sent: Tokens that were pushed, from the first on.
        components: What has these tokens: not what a draft model computes of them, which depends on later ones.
        pushes: How many pushes these were.
        closed: Whether the request has ended.
        complete: Whether its last push was made.
    """

    def __init__(self, room: Sending) -> None:
        self.room = room
        self.sent = 0
        self.components: set[str] = set()
        self.pushes = 0
        self.closed = False
        self.complete = False
        self.waiting: list[_Part] = []
        """Parts that are not wholly pushed. Layers of the first one may have been."""
        self.unsettled: dict[int, int] = {}
        """For each chunk that was pushed, how many pushes have to settle."""

    @property
    def under_way(self) -> bool:
        """Whether something that was pushed has not arrived."""
        return self.room.settled < self.pushes and self.room.status not in ENDED


class EarlyRooms:
    """The rooms of one worker. Runs on its main thread.

    Args:
        link: The link.
        groups: How block tables become indices.
        deadline: The link's ``deadline``, in seconds.
        ready: Makes an event that is true once all that was launched before this moment is computed.
        number: See `WorkerSide`.
    """

    def __init__(
        self,
        link: Link,
        groups: Sequence[Group],
        deadline: float,
        ready: Callable[[], Any],
        number: Callable[[str], int] | None,
    ) -> None:
        self._link = link
        self._groups = groups
        self._deadline = deadline
        self._ready = ready
        self._calls: dict[str, int] = {}
        """The layers of the model that vLLM calls for, and their numbers."""
        for group in groups:
            # The keys of an index are written before the attention of the same layer, which looks at them.
            if number is not None and not (group.draft or group.recurrent or group.of_index):
                self._calls.update({name: number(name) for name in group.layers})
        numbers = sorted(self._calls.values())
        self._up_to = {each: place for place, each in enumerate(numbers, 1)}
        """For each number, how many such layers have it or a lower one."""
        self._called: set[str] = set()
        self._highest = -1
        self._running: dict[str, tuple[EarlyRoom, _Part]] = {}
        """What the running step computes."""
        self._before: Any = None
        """The event of the last group that has left of the running step."""
        self._ends: frozenset[int] = frozenset()
        """The numbers of layers that end a group of any of these parts."""
        self._orders: dict[tuple[str, ...], _Order] = {}
        self._pause = min(deadline / 4, EXTENSION_SECONDS)
        self._due = 0.0
        self._rooms: dict[str, EarlyRoom] = {}
        self._settled: Counter[tuple[str, int]] = Counter()

    def __bool__(self) -> bool:
        """Whether there is any such room, or anything to say of one."""
        return bool(self._rooms or self._settled)

    def open(self, name: str, job: Open) -> None:
        """Open the room of a request whose prompt begins to be computed."""
        try:
            room = self._link.send(job.room, job.tokens, content=job.content)
        except StatelinkError as error:  # its end tries again, and says it
            log.debug("nothing of request %s is sent before its prompt is computed: %s", name, error.reason.coded)
        else:
            self._rooms[name] = EarlyRoom(room)

    def begin(self, chunks: Mapping[str, Chunk]) -> None:
        """A step begins that computes these parts of prompts."""
        self._called.clear()
        self._highest = -1
        self._before = None
        self._running.clear()
        for name, chunk in chunks.items():
            early = self._rooms.get(name)
            if early is None or early.closed:
                self._settled[name, chunk.number] += 1
            else:
                part = _Part(chunk, self._order_of(chunk))
                early.waiting.append(part)
                self._running[name] = early, part
        self._ends = frozenset().union(*(part.order.ends for _, part in self._running.values()))

    def _order_of(self, chunk: Chunk) -> _Order:
        """The layers of which a part has pages."""
        components = [
            group.component
            for group in self._groups
            if not (group.draft or group.recurrent) and (chunk.final or chunk.tables[group.table])
        ]
        names = tuple(component.name for component in components)
        known = self._orders.get(names)
        if known is None:
            buffers = (buffer for component in components for buffer in component.buffers)
            numbers = sorted({buffer.layer for buffer in buffers})
            known = self._orders[names] = _Order(
                frozenset(numbers[end - 1] for end in layer_groups(len(numbers))), numbers[-1] + 1 if numbers else 0
            )
        return known

    def layer(self, name: str) -> None:
        """A layer is launched. Pushes the layers up to it where that is all that was launched, and a group ends."""
        if not self._running:
            return
        number = self._calls.get(name)
        if number is None:
            return
        if name in self._called:
            self._repeated(name, number)
            return
        self._called.add(name)
        self._highest = max(self._highest, number)
        # Where layers are launched in another order than that of their numbers, they wait until none is missing.
        if number in self._ends and number == self._highest and len(self._called) == self._up_to[number]:
            self._push_layers(number)

    def _push_layers(self, number: int) -> None:
        if self._has_enough():
            return
        ready, made = None, False
        for name, (early, part) in self._running.items():
            if number not in part.order.ends or number < part.done or early.room.prefix is None:
                continue
            if not made:
                ready, made = self._ready(), True
                self._before = ready
            # Decode may have asked in the middle of the step: what waits from earlier ones goes before it.
            if self._push_launched(name, early):
                self._push(name, early, part, number + 1, ready)

    def _has_enough(self) -> bool:
        """Whether the network is busy with the groups before until the next one ends, so that this one can wait for it.

        No group has more layers than the one before it. So the network is busy if more than half of the rooms still
        wait for what has left of the step. That is not known while the device is behind the thread that launches: then
        nothing of the group before has moved. And for few rooms, a push costs less than a network with nothing to do.
        """
        left = [early for early, part in self._running.values() if part.done]
        if len(left) <= FEW_ROOMS or (self._before is not None and not self._before.query()):
            return False
        return sum(early.under_way for early in left) > len(left) // 2

    def _repeated(self, name: str, number: int) -> None:
        """A layer is launched twice in a step, so that what was pushed of it may be old. That is not tried again."""
        log.warning("vLLM computes layer %s twice in a step: layers are sent when all of them are computed", name)
        self._calls = {}
        for early, part in self._running.values():
            if part.done > number:
                early.room.abort(f"vLLM has computed layer {name} again after it was sent")

    def computed(self) -> None:
        """All layers are launched. Pushes what was not pushed before, or lets it wait until decode asks."""
        if not self._running:
            return
        ready = self._ready()
        for _, part in self._running.values():
            part.launched, part.ready = True, ready
        self._running.clear()
        self.go_on()

    def failed(self) -> None:
        """The forward pass has failed."""
        for early, _ in self._running.values():
            early.room.abort("the forward pass of prefill has failed")
        self._running.clear()

    def withdraw(self, name: str) -> None:
        """Forget what was not pushed of a request."""
        early = self._rooms.get(name)
        if early is not None:
            kept = [part for part in early.waiting if part.done]
            self._settled.update((name, part.chunk.number) for part in early.waiting if not part.done)
            early.waiting = kept

    def go_on(self) -> None:
        """Push what waits, where decode has asked. Extend rooms whose prompt is still being computed."""
        now = time.monotonic()
        due = now >= self._due
        if due:
            self._due = now + self._pause
        for name, early in self._rooms.items():
            if due and not early.closed:
                early.room.extend(self._deadline)
            if early.waiting and (early.room.prefix is not None or early.room.status in ENDED):
                self._push_launched(name, early)

    def _push_launched(self, name: str, early: EarlyRoom) -> bool:
        """Push the parts of a room that are launched. Returns whether the link took all of them."""
        return all(self._push(name, early, part, None, part.ready) for part in list(early.waiting) if part.launched)

    def _push(self, name: str, early: EarlyRoom, part: _Part, end: int | None, ready: Any) -> bool:
        """Push what `_move` says. Returns whether the link took it: it may have as many pushes as it may have."""
        try:
            self._move(early, part, end, ready)
        except StatelinkError as error:
            if error.code == "room.pushes":
                log.debug("a part of request %s is sent later: %s", name, error.reason.coded)
                return False
            log.warning("the state of request %s cannot be sent: %s", name, error.reason.coded)
            early.room.abort(f"prefill cannot push: {error}")
            self._over(early, part)
        return True

    def _move(self, early: EarlyRoom, part: _Part, end: int | None, ready: Any) -> None:
        """Push what is left of a part: below a layer, or all of it if that is ``None``.

        Raises:
            StatelinkError: The link does not take it. What it took before is noted.
        """
        chunk, span = part.chunk, (0, part.chunk.last)
        if part.layered is None:
            part.layered, part.rest = ({}, {}) if early.complete else self._items(early, chunk)
        below = part.order.end if end is None else end
        if part.layered and part.done < below:
            whole = end is None and not part.done
            items = {**part.layered, **part.rest} if whole else part.layered
            over = below == part.order.end and (whole or not part.rest)
            layers = None if whole else (part.done, below)
            early.room.push(items, span=span, layers=layers, ready=ready, last=over and chunk.final)
            early.pushes += 1
            part.done = below
            if over:
                self._over(early, part, complete=chunk.final)
                return
        if end is None:
            if chunk.final and not early.complete:
                early.room.push(part.rest, span=span, ready=ready, last=True)
                early.pushes += 1
            self._over(early, part, complete=chunk.final)

    @staticmethod
    def _over(early: EarlyRoom, part: _Part, *, complete: bool = False) -> None:
        """Nothing is left of a part."""
        early.waiting.remove(part)
        early.sent = max(part.chunk.last, early.sent)
        early.components |= (part.layered or {}).keys()
        early.complete |= complete
        early.unsettled[part.chunk.number] = early.pushes

    def _items(self, early: EarlyRoom, chunk: Chunk) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is pushed of each component of a part: by layers, and behind them."""
        # It may have been withdrawn from other ranks, which then get it again, and so does this one.
        first = max(chunk.first, early.sent)
        layered: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        for group in self._groups:
            name, page, blocks = group.component.name, group.component.page, chunk.tables[group.table]
            if group.draft:
                continue
            if blocks:
                if first < chunk.last:
                    items = group.items_of(blocks[(first - chunk.first) // (page * group.ratio) :])
                    layered[name] = Pages(items[: -(-(chunk.last - first) // page)], first)
            elif chunk.final:
                found = rest if group.recurrent else layered
                found[name] = group.indices(chunk.others[group.table], chunk.last, 0)
        return layered, rest

    def close(self, name: str) -> EarlyRoom | None:
        """Take the room of a request that has ended, to `finish` or to abort it; ``None`` if it has none."""
        early = self._rooms.get(name)
        if early is None or early.closed:
            return None
        self.withdraw(name)
        early.closed = True
        for part in early.waiting:
            early.unsettled[part.chunk.number] = early.pushes
        return early

    def finish(self, early: EarlyRoom, job: Send) -> None:
        """Push what was not pushed of a request.

        Raises:
            StatelinkError: The link does not take it.
        """
        for part in list(early.waiting):
            self._move(early, part, None, part.ready)
        if early.complete:
            return
        found: dict[str, Any] = {}
        for group in self._groups:
            begins = early.sent if group.component.name in early.components else 0
            if begins < job.tokens:
                indices = group.indices(job.tables[group.table], job.tokens, begins)
                found[group.component.name] = Pages(indices, begins) if begins else indices
        early.room.push(found, span=(0, job.tokens), last=True)

    def settled(self) -> Counter[tuple[str, int]]:
        """Chunks that nothing reads any more; each once."""
        for name, early in list(self._rooms.items()):
            if early.unsettled:
                over = early.room.status in ENDED and early.room.quiesced
                count = early.room.settled
                for number in [number for number, pushes in early.unsettled.items() if over or pushes <= count]:
                    del early.unsettled[number]
                    self._settled[name, number] += 1
            if early.closed and not early.unsettled:
                del self._rooms[name]
        made, self._settled = self._settled, Counter()
        return made
