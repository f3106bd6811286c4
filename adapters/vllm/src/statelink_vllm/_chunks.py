"""Rooms of requests whose prompt is still being computed: a worker's side.

A part of a prompt waits here until decode has asked for the request. What waits here can be withdrawn, and nothing
reads it. What was pushed is read, whatever becomes of the request meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from statelink import Pages, Status
from statelink.errors import StatelinkError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statelink import Link, Sending

    from ._inventory import Group
    from ._messages import Chunk, Open, Send

__all__ = ["EarlyRoom", "EarlyRooms"]

log = logging.getLogger("vllm.statelink")

ENDED = (Status.SUCCEEDED, Status.FAILED)
EXTENSION_SECONDS = 10.0
"""Most seconds between two extensions of a room whose prompt is still being computed."""


class EarlyRoom:
    """The room of one request.

    Attributes:
        room: It.
        sent: Tokens that were pushed, from the first on.
        components: What has these tokens: not what a draft model computes of them, which depends on later ones.
        pushes: How many pushes these were.
        closed: Whether its last push was made, or it was given up.
    """

    def __init__(self, room: Sending) -> None:
        self.room = room
        self.sent = 0
        self.components: set[str] = set()
        self.pushes = 0
        self.closed = False
        self.waiting: list[tuple[Chunk, Any]] = []
        """Chunks that were not pushed, and the event after which each is computed."""
        self.unsettled: dict[int, int] = {}
        """For each chunk that was pushed, how many pushes have to settle."""


class EarlyRooms:
    """The rooms of one worker. Runs on its main thread.

    Args:
        link: The link.
        groups: How block tables become indices.
        deadline: The link's ``deadline``, in seconds.
    """

    def __init__(self, link: Link, groups: Sequence[Group], deadline: float) -> None:
        self._link = link
        self._groups = groups
        self._deadline = deadline
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

    def add(self, name: str, chunk: Chunk, ready: Any) -> None:
        """Push a part of a prompt, soon. ``ready`` is the event after which it is computed."""
        early = self._rooms.get(name)
        if early is None or early.closed:
            self._settled[name, chunk.number] += 1
        else:
            early.waiting.append((chunk, ready))

    def withdraw(self, name: str) -> None:
        """Forget what was not pushed of a request."""
        early = self._rooms.get(name)
        if early is not None:
            self._settled.update((name, chunk.number) for chunk, _ in early.waiting)
            early.waiting.clear()

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
                for chunk, ready in early.waiting:
                    self._push(name, early, chunk, ready)
                early.waiting.clear()

    def _push(self, name: str, early: EarlyRoom, chunk: Chunk, ready: Any) -> None:
        # It may have been withdrawn from other ranks, which then get it again, and so does this one.
        first = max(chunk.first, early.sent)
        items = self._items(chunk, first) if first < chunk.last else {}
        early.sent = max(chunk.last, early.sent)
        early.components |= items.keys()
        if items:
            try:
                early.room.push(items, span=(first, chunk.last), ready=ready)
                early.pushes += 1
            except StatelinkError as error:
                log.warning("the state of request %s cannot be sent: %s", name, error.reason.coded)
                early.room.abort(f"prefill cannot push: {error}")
        early.unsettled[chunk.number] = early.pushes

    def _items(self, chunk: Chunk, first: int) -> Mapping[str, Any]:
        found = {}
        for group in self._groups:
            blocks = chunk.tables[group.table]
            if blocks and not group.draft:
                skipped = (first - chunk.first) * len(blocks) // (chunk.last - chunk.first)
                found[group.component.name] = group.items_of(blocks[skipped:])
        return found

    def close(self, name: str) -> EarlyRoom | None:
        """Take the room of a request that has ended, for its last push or to abort it; ``None`` if it has none."""
        early = self._rooms.get(name)
        if early is None or early.closed:
            return None
        self.withdraw(name)
        early.closed = True
        return early

    def last(self, early: EarlyRoom, job: Send) -> Mapping[str, Any]:
        """What the last push has of each component: what was not pushed before."""
        found: dict[str, Any] = {}
        for group in self._groups:
            begins = early.sent if group.component.name in early.components else 0
            indices = group.indices(job.tables[group.table], job.tokens, begins)
            found[group.component.name] = Pages(indices, begins) if begins else indices
        return found

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
