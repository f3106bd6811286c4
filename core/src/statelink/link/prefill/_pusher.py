"""Moves the pushes of one delivery: plans them, calls their send hooks and submits their blocks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from statelink.backend import Batch, Blocks, Moved
from statelink.errors import RoomError
from statelink.link._hook_context import HookContext
from statelink.link._verify import digest_of, packed
from statelink.link.peers import check_transport
from statelink.link.runtime import Moving, move, reason_of
from statelink.plan import MAX_BATCH, ComponentPlan, Move, Whole, plan_move

from ._covered import Covered
from ._pushes import Pushes, PushResult, Then

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from statelink.backend import SendHook, Transfer
    from statelink.errors import Reason
    from statelink.link._context import Context
    from statelink.link.runtime import Steps, Until
    from statelink.plan import Items, PairPlan
    from statelink.wire import Request

    from ._decode_rank import DecodeRank
    from ._line import Line
    from ._push import Push

__all__ = ["Pusher"]


class SendHookContext(HookContext):
    """The `statelink.backend.SendContext` of one component of one room and peer.

    Args:
        context: The link's parts.
        request: The peer's request.
        peer: The peer's link name.
        component: The component.
        line: The peer's line.
        pusher: Whose hook it is. A weak reference: pusher, hook and context would be a cycle, and a hook may keep this.
    """

    __slots__ = ("_line", "_pusher", "strategy")

    def __init__(
        self,
        context: Context,
        request: Request,
        peer: str,
        component: str,
        line: Line,
        pusher: weakref.ref[Pusher],
    ) -> None:
        super().__init__(context, request.room, request.generation, peer, component)
        self.strategy = context.strategies[component].name
        self._line = line
        self._pusher = pusher

    def wake(self) -> None:
        """See `statelink.backend.SendContext.wake`. Any thread; the hook is called again by a job."""
        pusher = self._pusher()
        if pusher is not None:
            self._line.wake(pusher)


class Payload:
    """Joins the blocks of all components of a push to one stream, checks it against the plan, and counts it.

    A batch counts once the backend has all of it. Belongs to the jobs with the peer's key.

    Args:
        hooks: Send hook per component.
        context_of: The context of a component's hook.
        elsewhere: Components whose bytes do not go to decode's items.
        limit: Most blocks of a batch.
        peer: The destination's name, for errors.

    Attributes:
        moved: Per component, the bytes and blocks that count so far.
    """

    def __init__(
        self,
        hooks: Mapping[str, SendHook],
        context_of: Callable[[str], SendHookContext],
        elsewhere: Collection[str],
        limit: int,
        peer: str,
    ) -> None:
        self.moved: dict[str, Moved] = {}
        self._hooks = hooks
        self._context_of = context_of
        self._elsewhere = elsewhere
        self._limit = min(limit, MAX_BATCH)
        self._peer = peer
        self._waiting: list[Blocks] = []
        self._tally: list[tuple[str, int, int]] = []

    def blocks(self, moves: list[Move]) -> Iterator[Blocks | None]:
        """Batches of blocks for `move`; ``None`` where a hook has to wait.

        Small batches of neighbouring components are joined, since a submission costs more than a block.

        Raises:
            RoomError: A strategy that writes in place yields more or fewer bytes than planned (``room.bytes``).
        """
        count = 0
        for piece in moves:
            name, nbytes = piece.component, 0
            in_place = name not in self._elsewhere
            for blocks in self._hooks[name].blocks(self._context_of(name), piece):
                if blocks is None:
                    yield from self._flushed()
                    yield None
                    count = 0
                    continue
                total, size = blocks.total, blocks.count
                nbytes += total
                if in_place and nbytes > piece.nbytes:
                    raise self._unlike(piece, f"more than {piece.nbytes}")
                if count + size > self._limit:
                    yield from self._flushed()
                    count = 0
                self._waiting.append(blocks)
                self._tally.append((name, total if in_place else 0, size))
                count += size
            if in_place and nbytes != piece.nbytes:
                raise self._unlike(piece, str(nbytes))
            if not in_place:  # count the planned bytes: the receive hook checks that they arrived
                self._tally.append((name, piece.nbytes, 0))
        yield from self._flushed()

    def _flushed(self) -> Iterator[Blocks]:
        """Yield what waits as one batch, and count it once the caller comes back for more."""
        waiting, self._waiting = self._waiting, []
        tally, self._tally = self._tally, []
        if waiting:
            yield Blocks.concatenate(waiting)
        for name, nbytes, blocks in tally:
            before = self.moved.get(name)
            here = Moved(nbytes, blocks)
            self.moved[name] = here if before is None else before + here

    def _unlike(self, piece: Move, handed: str) -> RoomError:
        name = piece.component
        return RoomError(
            "a strategy does not move what the plan says",
            cause=f"{piece.nbytes} bytes of component {name!r} are planned for a push, {handed} were handed over",
            hint="blocks() of its send hook yields every block of the move once, and no other",
            component=name,
            peer=self._peer,
            strategy=self._context_of(name).strategy,
            code="room.bytes",
        )


class Pusher(Pushes):
    """Moves the pushes of one delivery, one after the other.

    Its state belongs to the jobs with the peer's key, of which one runs at a time: those of the peer's `Line`, which
    says when it goes on. The control thread makes it, opens the hooks, and appends pushes.

    Args:
        context: The link's parts.
        rank: The destination.
        request: The destination's request.
        tokens: N.
        plan: What this rank writes for the destination.
        targets: Destination items per component.
        line: The destination's line.

    Attributes:
        hooks: Send hook per component; only the hooks that were opened.
    """

    def __init__(
        self,
        context: Context,
        rank: DecodeRank,
        request: Request,
        tokens: int,
        plan: PairPlan,
        targets: dict[str, Items],
        line: Line,
    ) -> None:
        super().__init__()
        self._context = context
        self._line = line
        self._rank = rank
        self._request = request
        self._tokens = tokens
        self._plan = plan
        self._targets = targets
        self._covered: Covered | None = None
        """What was pushed; made for the first push that does not bring the whole request."""
        self._digests: dict[str, int] = {}
        self._under_way: Steps[PushResult] | None = None
        self.hooks: dict[str, SendHook] = {}
        self._contexts: dict[str, SendHookContext] = {}
        self._plain = context.config.verify == "off" and not request.elsewhere
        """Whether nothing but the blocks of a move is asked of any component."""

    def open_hooks(self) -> None:
        """Make and open a hook for each component. Control thread.

        Raises:
            BaseException: What a strategy raises; hooks that were opened before stay in `hooks`.
        """
        prompt, strategies = True, self._context.strategies
        for name in self._plan.components:
            hook = strategies[name].sender()
            if not hook.plain:
                self._plain = False
                hook.open(self.context_of(name), self._request.prepared.get(name, b""))
            self.hooks[name] = hook
            prompt = prompt and hook.prompt
        self.prompt = prompt and self._context.config.verify == "off"

    def context_of(self, component: str) -> SendHookContext:
        """The context of a component's hook. Any thread."""
        known = self._contexts.get(component)
        if known is None:
            made = SendHookContext(
                self._context, self._request, self._rank.name, component, self._line, weakref.ref(self)
            )
            known = self._contexts.setdefault(component, made)
        return known

    def step(self, answer: Transfer | BaseException | None = None) -> Batch | Until | None:
        """See `Pushes.step`."""
        push, then = self.waiting[0][:2]
        if self._under_way is None:
            self._under_way = self._carry(push, then)
        try:
            if answer is not None and isinstance(answer, BaseException):
                return self._under_way.throw(answer)
            return self._under_way.send(answer)
        except StopIteration as ended:
            self._under_way = None
            self.waiting.popleft()
            pushed = ended.value
            self._context.post(lambda: then(pushed))
            return None

    def _carry(self, push: Push, then: Then) -> Steps[PushResult]:
        """Plan a push, call its hooks, have its blocks submitted, and wait until all are visible at the destination.

        Yields as `move` does. Never raises: a failure is in the result.
        """
        if self.cancelled.raised:  # its hooks may have been told
            return PushResult(push, Moving(0, 0, None), {}, {}, {})
        context, request, peer = self._context, self._request, self._rank.name
        parts: Iterable[Blocks | None]
        granules: dict[str, tuple[int, int]] = {}
        moved: dict[str, Moved]
        try:
            require = context.config.require
            if require:  # the backend may have connected again since the rank was attached, over another transport
                check_transport(require, self._rank.carrier(), context.backend.name, peer)
            whole = self._whole(push)
            if whole is not None:
                granules, parts, moved = whole.granules, (whole.blocks,), _moved(whole)
            else:
                payload = Payload(
                    self.hooks, self.context_of, request.elsewhere, context.backend.capabilities.max_blocks, peer
                )
                moved = payload.moved
                moves = self._moves(push, granules)
                self._digest(moves)
                parts = payload.blocks(moves)
        except BaseException as error:
            return PushResult(push, Moving(0, 0, reason_of(error, room=request.room)), granules, {}, {})
        if push.last and request.landing and self._plain:
            parts = self._announced(
                parts, then, PushResult(push, Moving(0, 0, None), granules, moved, {}, landing=True)
            )
        moving = yield from move(
            context.backend,
            peer,
            parts,
            room=request.room,
            generation=request.generation,
            tables=(context.regions, self._rank.regions),
            piece=self._line.piece,
            cancelled=self.cancelled,
        )
        if moving.reason is None and push.last and not moving.pending:
            reason = self._finish()
            moving = moving if reason is None else moving._replace(reason=reason)
        if whole is not None and moving.nbytes < whole.blocks.total:
            moved = {}
        digests = {name: packed(digest) for name, digest in self._digests.items()} if self._digests else {}
        return PushResult(push, moving, granules, moved, digests)

    def _announced(self, parts: Iterable[Blocks | None], then: Then, landing: PushResult) -> Iterator[Blocks | None]:
        """The parts of the last push. When `move` asks for one more, the backend has all of them."""
        yield from parts
        self._context.post(partial(then, landing))

    def _whole(self, push: Push) -> Whole | None:
        """What a push moves, if it is the only one of its room, and can be listed in one expression."""
        if not (self._plain and push.last and push.number == 0 and push.layers is None):
            return None
        plan = self._plan
        return plan.shapes.whole(plan.components, push.items, self._targets, self._tokens, self._request.prefix)

    def _moves(self, push: Push, granules: dict[str, tuple[int, int]]) -> list[Move]:
        """What a push moves of each component. Fills in the granules.

        Raises:
            RoomError: It overlaps with an earlier one, or is the last one and leaves something out.
        """
        if self._covered is None:
            self._covered = Covered(self._plan, self._tokens, self._request.prefix, self._rank.name)
        moves: list[tuple[ComponentPlan, Move]] = []
        for name, items in push.items.items():
            plan = self._plan.components.get(name)
            if plan is None:
                continue  # another prefill rank writes this component for this destination, as both sides' plans say
            piece = plan_move(plan, items, self._targets[name], self._covered.owed(name), push.layers)
            if piece.nbytes:
                moves.append((plan, piece))
        for plan, piece in moves:
            self._covered.add(plan, piece)
            granules[piece.component] = piece.granules
        if push.last:
            self._covered.check_complete()
        return [piece for _, piece in moves]

    def _digest(self, moves: list[Move]) -> None:
        """Digest what moves, where both sides verify: before it moves, so that a later write to it is detected."""
        if self._context.config.verify == "off":
            return
        for piece in moves:
            digest = digest_of(piece.state_bytes(), self.cancelled, self._context.reader_of(piece.component))
            self._digests[piece.component] = self._digests.get(piece.component, 0) + digest

    def _finish(self) -> Reason | None:
        if self._plain:
            return None
        for name, hook in self.hooks.items():
            try:
                hook.finish(self.context_of(name))
            except BaseException as error:
                strategy = self._context.strategies[name].name
                return reason_of(error, room=self._request.room, component=name, strategy=strategy)
        return None


def _moved(whole: Whole) -> dict[str, Moved]:
    """The bytes and blocks of each component of a push that is listed as a whole."""
    each = zip(whole.granules, whole.nbytes, whole.counts, strict=True)
    return {name: Moved(nbytes, blocks) for name, nbytes, blocks in each}
