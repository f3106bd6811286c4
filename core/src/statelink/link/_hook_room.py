"""What a strategy's hook sees of the room that it serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from statelink.errors import WireError
from statelink.plan import due, expected_move
from statelink.wire import Note

if TYPE_CHECKING:
    from statelink.backend import Fencing
    from statelink.plan import Move

    from ._node import Node
    from ._order import Job
    from ._receiving import Receiving, Writer

__all__ = ["HookRoom", "ReceiveRoom", "SendRoom"]

MAX_NOTE = 64 << 10


class _Use(Protocol):
    @property
    def room(self) -> int: ...
    @property
    def generation(self) -> int: ...


class HookRoom:
    """The `statelink.backend.HookContext` of one component of one room and peer."""

    __slots__ = ("_address", "_node", "component", "generation", "peer", "room")

    def __init__(self, node: Node, use: _Use, peer: str, component: str, address: str | None = None) -> None:
        self._node = node
        self._address = address
        self.room = use.room
        self.generation = use.generation
        self.peer = peer
        self.component = component

    def message(self, payload: bytes) -> None:
        """See `statelink.backend.HookContext.message`.

        Raises:
            WireError: The payload is larger than 64 KiB.
        """
        if len(payload) > MAX_NOTE:
            raise WireError(f"a strategy's message of {len(payload)} bytes", cause=f"at most {MAX_NOTE} are sent")
        note = Note(
            sender=self._node.name,
            to=self.peer,
            room=self.room,
            generation=self.generation,
            component=self.component,
            payload=payload,
        )

        def job() -> None:
            self._node.send(note, self._address)

        self._node.post(job)


class SendRoom(HookRoom):
    """The `statelink.backend.SendContext` of one component of one room and peer."""

    __slots__ = ("_resume",)

    def __init__(self, node: Node, use: _Use, peer: str, component: str, resume: Job) -> None:
        super().__init__(node, use, peer, component)
        self._resume = resume

    def wake(self) -> None:
        """See `statelink.backend.SendContext.wake`."""
        self._node.movers.submit(("peer", self.peer), self._resume)


class ReceiveRoom(HookRoom):
    """The `statelink.backend.ReceiveContext` of one component of one room and writer."""

    __slots__ = ("_fail", "_fencing", "_receiving", "_writer")

    def __init__(
        self,
        node: Node,
        receiving: Receiving,
        writer: Writer,
        component: str,
        fencing: Fencing | None,
        fail: Callable[[BaseException], None],
    ) -> None:
        super().__init__(node, receiving, writer.source.name, component, writer.source.address)
        self._receiving = receiving
        self._writer = writer
        self._fencing = fencing
        self._fail = fail

    def expected(self) -> Move:
        """See `statelink.backend.ReceiveContext.expected`."""
        room = self._receiving
        plan = self._writer.plan.components[self.component]
        owed = due(plan.source, plan.target, room.tokens, room.prefix or 0)
        return expected_move(plan, room._items[self.component], owed)

    def lend(self, address: int, nbytes: int, then: Callable[[], None]) -> None:
        """See `statelink.backend.ReceiveContext.lend`."""

        def job() -> None:
            # In one line with the taking back, which follows the end: what is lent late would never be taken back.
            if self._receiving._ended.is_set():
                return
            try:
                if self._fencing is not None:
                    ranges = np.array([address], np.uint64), np.array([nbytes], np.uint64)
                    self._fencing.grant(self.peer, self.room, self.generation, *ranges)
                then()
            except BaseException as error:
                self._fail(error)

        self._node.fences.submit(("room", self.room), job)
