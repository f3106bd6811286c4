"""What a send hook sees of its room."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelink.link._hook_context import HookContext

if TYPE_CHECKING:
    from statelink.link._context import Context
    from statelink.link.runtime import Job
    from statelink.wire import Request

__all__ = ["SendHookContext"]


class SendHookContext(HookContext):
    """The `statelink.backend.SendContext` of one component of one room and peer.

    Args:
        context: The link's parts.
        request: The peer's request.
        peer: The peer's link name.
        component: The component.
        resume: Goes on with the pushes to the peer. A job for the peer's key. It must not keep the room alive, since
            a hook may keep this context.
    """

    __slots__ = ("_resume", "strategy")

    def __init__(self, context: Context, request: Request, peer: str, component: str, resume: Job) -> None:
        super().__init__(context, request.room, request.generation, peer, component)
        self.strategy = context.strategies[component].name
        self._resume = resume

    def wake(self) -> None:
        """See `statelink.backend.SendContext.wake`. Any thread; the hook is called again by a job."""
        self._context.workers.moves.submit(("peer", self.peer), self._resume)
