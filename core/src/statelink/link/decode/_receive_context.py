"""What a receive hook sees of its room."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from statelink.link._hook_context import HookContext
from statelink.plan import due, expected_move

if TYPE_CHECKING:
    from statelink.link._context import Context
    from statelink.link.runtime import Flag
    from statelink.plan import ComponentPlan, Items, Move

    from ._instance import PrefillRank
    from ._receiving import Accepted

__all__ = ["ReceiveHookContext"]


class ReceiveHookContext(HookContext):
    """The `statelink.backend.ReceiveContext` of one component of one room and writer.

    Args:
        context: The link's parts.
        accepted: What the engine accepted.
        rank: The writer.
        component: The component.
        plan: What the writer writes of the component.
        ended: Set by the control thread once the room has ended.
        fail: Called on a data thread with the writer's name, the component, and what a grant or a callback raised. It
            must not keep the room alive, since a hook may keep this context.
    """

    __slots__ = ("_accepted", "_ended", "_fail", "_plan")

    def __init__(
        self,
        context: Context,
        accepted: Accepted,
        rank: PrefillRank,
        component: str,
        plan: ComponentPlan,
        ended: Flag,
        fail: Callable[[str, str, BaseException], None],
    ) -> None:
        super().__init__(context, accepted.room, accepted.generation, rank.name, component, rank.address)
        self._accepted = accepted
        self._plan = plan
        self._ended = ended
        self._fail = fail

    def know(self, accepted: Accepted) -> None:
        """The number of tokens is known by now. Control thread, before the hook's ``finish`` is called."""
        self._accepted = accepted

    def expected(self) -> Move:
        """See `statelink.backend.ReceiveContext.expected`."""
        accepted, plan = self._accepted, self._plan
        owed = due(plan.source, plan.target, accepted.tokens, accepted.prefix)
        items: Items = accepted.items[self.component]
        return expected_move(plan, items, owed)

    def grant(self, address: int, nbytes: int, then: Callable[[], None]) -> None:
        """See `statelink.backend.ReceiveContext.grant`. Any thread; ``then`` is called on a data thread."""
        fencing = self._context.fencing

        def job() -> None:
            # The revocation has the same key, and is submitted once `ended` is set. So a grant that runs after the
            # revocation sees `ended`; otherwise it would never be revoked.
            if self._ended.is_set():
                return
            try:
                if fencing is not None:
                    ranges = np.array([address], np.uint64), np.array([nbytes], np.uint64)
                    fencing.grant(self.peer, self.room, self.generation, *ranges)
                then()
            except BaseException as error:
                self._fail(self.peer, self.component, error)

        self._context.workers.fences.submit_job(("room", self.room), job)
