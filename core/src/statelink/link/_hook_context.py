"""What a hook, of either side, sees of its room."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelink.errors import WireError
from statelink.wire import Note

if TYPE_CHECKING:
    from ._context import Context

__all__ = ["HookContext"]

MAX_NOTE = 64 << 10


class HookContext:
    """The `statelink.backend.HookContext` of one component of one room and peer.

    Args:
        context: The link's parts.
        room: The room's id.
        generation: The generation of its use.
        peer: The peer's link name.
        component: The component.
        address: Where this link dialled the peer; ``None`` if the peer dialled this link.
    """

    __slots__ = ("_address", "_context", "component", "generation", "peer", "room")

    def __init__(
        self, context: Context, room: int, generation: int, peer: str, component: str, address: str | None = None
    ) -> None:
        self._context = context
        self._address = address
        self.room = room
        self.generation = generation
        self.peer = peer
        self.component = component

    def message(self, payload: bytes) -> None:
        """See `statelink.backend.HookContext.message`. Any thread; the control thread sends the message.

        Raises:
            WireError: The payload is larger than 64 KiB.
        """
        if len(payload) > MAX_NOTE:
            raise WireError(f"a strategy's message of {len(payload)} bytes", cause=f"at most {MAX_NOTE} are sent")
        note = Note(
            sender=self._context.name,
            to=self.peer,
            room=self.room,
            generation=self.generation,
            component=self.component,
            payload=payload,
        )

        # Only the control thread may use the sockets.
        def job() -> None:
            self._context.channel.send(note, self._address)

        self._context.post_job(job)
