"""What a strategy's hook sees of the room that it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from statelink.errors import WireError
from statelink.wire import Note

if TYPE_CHECKING:
    from ._node import Node

__all__ = ["HookRoom"]

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
