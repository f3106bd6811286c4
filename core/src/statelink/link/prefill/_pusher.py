"""The pushes of one delivery on their way out: planned, handed to the strategies, submitted. Runs on data threads."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, NamedTuple

from statelink.link._verify import digest_of, packed
from statelink.link.peers import check_transport
from statelink.link.runtime import Moving, move, reason_of
from statelink.plan import ComponentPlan, Move, plan_move

from ._coverage import Coverage
from ._payload import Payload
from ._send_context import SendHookContext

if TYPE_CHECKING:
    import threading

    from statelink.backend import Moved, SendHook
    from statelink.errors import Reason
    from statelink.link._context import Context
    from statelink.plan import Items, PairPlan
    from statelink.wire import Request

    from ._decode_rank import DecodeRank
    from ._push import Push

__all__ = ["Pushed", "Pusher"]


class Pushed(NamedTuple):
    """What became of one push to one destination.

    Attributes:
        push: The push.
        moving: Bytes, blocks, failure.
        granules: Per component, ``[first, last)`` of the granules that moved.
        moved: Per component, what the backend was given.
        digests: Per component, the digest of everything that was moved so far, where both sides verify.
    """

    push: Push
    moving: Moving
    granules: dict[str, tuple[int, int]]
    moved: dict[str, Moved]
    digests: dict[str, bytes]


class Pusher:
    """Carries the pushes of one delivery, one after the other.

    What it holds belongs to the jobs with the peer's key, of which one runs at a time. The control thread makes it,
    opens the hooks, and submits the jobs.

    Args:
        context: The link's parts.
        rank: The destination.
        request: What it asked for.
        plan: What this rank writes for it.
        targets: Destination items per component.
        cancelled: Set by the control thread when the room failed.
    """

    def __init__(
        self,
        context: Context,
        rank: DecodeRank,
        request: Request,
        plan: PairPlan,
        targets: dict[str, Items],
        cancelled: threading.Event,
    ) -> None:
        self._context = context
        self._rank = rank
        self._request = request
        self._plan = plan
        self._targets = targets
        self._cancelled = cancelled
        self._coverage = Coverage(plan, request.tokens, request.prefix, rank.name)
        self._digests: dict[str, int] = {}
        self._line: deque[tuple[Push, Callable[[Pushed], None]]] = deque()
        """Pushes that have not gone out, and whom to tell; the first is under way."""
        self._under_way: Generator[float | None, None, Pushed] | None = None
        self.hooks: dict[str, SendHook] = {}
        self.contexts: dict[str, SendHookContext] = {}

    def open_hooks(self) -> None:
        """Make and open a hook for each component. Control thread.

        Raises:
            BaseException: What a strategy raises; hooks that were opened before stay in `hooks`.
        """
        resume = weakref.WeakMethod(self.resume)  # a hook keeps its context, and this keeps the hook

        def wake() -> Generator[float, None, None] | None:
            living = resume()
            return living() if living is not None else None

        for name in self._plan.components:
            hook = self._context.strategies[name].sender()
            context = SendHookContext(self._context, self._request, self._rank.name, name, wake)
            self.contexts[name] = context
            hook.open(context, self._request.prepared.get(name, b""))
            self.hooks[name] = hook

    def add(self, push: Push, then: Callable[[Pushed], None]) -> Generator[float, None, None] | None:
        """Send a push after those before it; ``then`` is called on the control thread. A job with the peer's key."""
        self._line.append((push, then))
        return self.resume() if len(self._line) == 1 else None  # else it follows when those before it have gone out

    def resume(self) -> Generator[float, None, None]:
        """Let pushes go out, up to where a strategy waits. A job with the peer's key."""
        while self._line:
            push, then = self._line[0]
            if self._under_way is None:
                self._under_way = self._carry(push)
            try:
                pause = next(self._under_way)
            except StopIteration as ended:
                self._under_way = None
                self._line.popleft()
                self._report(then, ended.value)
            else:
                if pause is None:
                    return  # its strategy wakes it, or the end of the room does
                yield pause

    def _report(self, then: Callable[[Pushed], None], pushed: Pushed) -> None:
        self._context.post(lambda: then(pushed))

    def _carry(self, push: Push) -> Generator[float | None, None, Pushed]:
        """Plan, hand to the strategies, submit, and wait until everything is visible at the destination.

        Yields as `move` does. Never raises: what goes wrong is in the result.
        """
        context, request, peer = self._context, self._request, self._rank.name
        limit = context.backend.capabilities.max_blocks
        payload = Payload(self.hooks, self.contexts, request.elsewhere, limit, peer)
        granules: dict[str, tuple[int, int]] = {}
        try:
            # A new connection may have another transport than the one that was required when it attached.
            check_transport(context.config.require, self._rank.transport(), context.backend.name, peer)
            moves = list(self._moves(push))
            for plan, piece in moves:
                self._coverage.add(plan, piece)
                granules[piece.component] = piece.grains
            if push.last:
                self._coverage.check_complete()
            if context.config.verify != "off":
                # Before the move, so that a later write of the engine to these pages is detected.
                for _, piece in moves:
                    digest = digest_of(piece.content(), self._cancelled)
                    self._digests[piece.component] = self._digests.get(piece.component, 0) + digest
        except BaseException as error:
            return Pushed(push, Moving(0, 0, reason_of(error, room=request.room)), granules, {}, {})
        moving = yield from move(
            context.backend,
            peer,
            payload.blocks([piece for _, piece in moves]),
            room=request.room,
            generation=request.generation,
            tables=(context.regions, self._rank.regions),
            slice_bytes=context.config.slice_bytes,
            cancelled=self._cancelled,
        )
        if moving.reason is None and push.last and not moving.pending:
            moving = moving._replace(reason=self._finish())
        digests = {name: packed(digest) for name, digest in self._digests.items()}
        return Pushed(push, moving, granules, payload.moved, digests)

    def _moves(self, push: Push) -> Iterator[tuple[ComponentPlan, Move]]:
        for name, items in push.items.items():
            plan = self._plan.components.get(name)
            if plan is None:
                continue  # held by this rank, and assigned to another writer: the plan's digest vouches for it
            piece = plan_move(plan, items, self._targets[name], self._coverage.owed(name), push.layers)
            if piece.nbytes:
                yield plan, piece

    def _finish(self) -> Reason | None:
        for name, hook in self.hooks.items():
            try:
                hook.finish(self.contexts[name])
            except BaseException as error:
                strategy = self._context.strategies[name].name
                return reason_of(error, room=self._request.room, component=name, strategy=strategy)
        return None
