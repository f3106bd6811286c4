"""Moves the pushes of one delivery: plans them, calls their send hooks, and lists batches that the `Line` submits."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, TypeVar

from statelink.backend import Backend, Batch, Blocks, Moved, Outcome, Side, Transfer
from statelink.errors import TransferError
from statelink.link._reasons import BackendDefect, reason_of
from statelink.link._verify import digest_of, packed
from statelink.link.peers import check_transport
from statelink.plan import ComponentPlan, Cutter, Move, RegionTable, Whole, plan_move

from ._covered import Covered
from ._push import Moving, Pushes, PushResult, Then, Until
from ._send_hooks import Payload, SendHookContext

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from statelink.backend import SendHook
    from statelink.errors import Reason
    from statelink.link._context import Context
    from statelink.link.runtime import Flag
    from statelink.plan import Items, PairPlan
    from statelink.wire import Request

    from ._decode_ranks import DecodeRank
    from ._line import Line
    from ._push import Push

__all__ = ["Pusher"]

Result = TypeVar("Result")
Steps = Generator[Batch | Until, Transfer | None, Result]
"""What waits without a thread. It yields a batch, or what it waits for. A batch is answered by sending its transfer, by
sending ``None`` if nobody submits it because the room was cancelled, or by throwing what ``submit`` raised."""


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
            self._context.post_job(then, pushed)
            return None

    def _carry(self, push: Push, then: Then) -> Steps[PushResult]:
        """Plan a push, call its hooks, have its blocks submitted, and wait until all are visible at the destination.

        Yields as `move` does. Never raises: a failure is in the result.
        """
        context, request, peer = self._context, self._request, self._rank.name
        if self.cancelled.raised:  # its hooks may have been told
            return PushResult(push, peer, Moving(0, 0, None), {}, {}, {})
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
            return PushResult(push, peer, Moving(0, 0, reason_of(error, room=request.room)), granules, {}, {})
        if push.last and request.landing and self._plain:
            parts = self._announced(
                parts, then, PushResult(push, peer, Moving(0, 0, None), granules, moved, {}, landing=True)
            )
        moving = yield from move(
            context.backend,
            peer,
            parts,
            room=request.room,
            generation=request.generation,
            tables=(context.regions, self._rank.regions),
            piece=self._line.pace.piece,
            cancelled=self.cancelled,
        )
        if moving.reason is None and push.last and not moving.pending:
            reason = self._finish()
            moving = moving if reason is None else moving._replace(reason=reason)
        if whole is not None and moving.nbytes < whole.blocks.total:
            moved = {}
        digests = {name: packed(digest) for name, digest in self._digests.items()} if self._digests else {}
        return PushResult(push, peer, moving, granules, moved, digests)

    def _announced(self, parts: Iterable[Blocks | None], then: Then, landing: PushResult) -> Iterator[Blocks | None]:
        """The parts of the last push. When `move` asks for one more, the backend has all of them."""
        yield from parts
        self._context.post_job(then, landing)

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


def move(
    backend: Backend,
    peer: str,
    parts: Iterable[Blocks | None],
    *,
    room: int,
    generation: int,
    tables: tuple[RegionTable, RegionTable],
    piece: Callable[[int], int],
    cancelled: Flag,
) -> Steps[Moving]:
    """Write batches to a peer and wait until they are visible there.

    Args:
        backend: The backend.
        peer: Link name of the destination.
        parts: Batches of blocks. ``None`` means: wait until every batch before is visible; the next may take a while.
        room: The room id.
        generation: The generation of its use.
        tables: Region tables of the source and of the destination.
        piece: Says how many of the bytes that are left of a batch of blocks are given to the backend next.
        cancelled: Set by the control thread when the room failed. Then no transfer is started or waited for any more.
    """
    limits = backend.capabilities
    checked = tables[0].key, tables[1].key
    running: list[Transfer] = []
    nbytes = blocks = 0
    reason: Reason | None = None
    unsettled: frozenset[Side] = frozenset()
    strays: list[Transfer] = []
    try:
        for part in parts:
            if part is None:
                if running:
                    running = yield from _ends(backend, cancelled, running)
                elif not cancelled.raised:  # nothing would resume it after it was cancelled
                    yield Until.WOKEN
                if cancelled.raised:
                    return Moving(nbytes, blocks, reason, pending=tuple(running))
                continue
            tables[0].check("here", part.source, part.nbytes, part.source_region)
            tables[1].check("by the peer", part.target, part.nbytes, part.target_region)
            left = part.total
            cutter: Cutter | None = None
            while left:
                if running:
                    running = _left(backend, running)
                if cancelled.raised:
                    return Moving(nbytes, blocks, reason, pending=tuple(running))
                size = piece(left)
                if cutter is None and (size < left or len(part.nbytes) > limits.max_blocks):
                    cutter = Cutter(part.narrow(size), limits.max_blocks)
                taken = part if cutter is None else cutter.take(size)
                transfer = yield Batch(taken, room, generation, checked, taken is not part)
                if transfer is None:
                    return Moving(nbytes, blocks, reason, pending=tuple(running))
                running.append(transfer)
                size = left if taken is part else taken.total
                left -= size
                nbytes += size
                blocks += len(taken.nbytes)
    except GeneratorExit:
        raise  # this generator was closed: its result is not needed
    except BaseException as error:
        reason = reason_of(error, backend=backend.name, peer=peer)
        if isinstance(error, BackendDefect):
            unsettled, running = frozenset(Side), _running(running)
        elif isinstance(error, _Failed):
            running, strays = error.running, [*error.strays]
    while running and not cancelled.raised:
        try:
            running = yield from _ends(backend, cancelled, running)
        except GeneratorExit:
            raise
        except _Failed as failed:
            reason = reason or reason_of(failed, backend=backend.name, peer=peer)
            running = failed.running
            strays += failed.strays
        except BaseException as error:  # ``poll`` raised: it is not known how they end, and they are polled later
            if isinstance(error, BackendDefect):
                unsettled, running = frozenset(Side), _running(running)
            reason = reason or reason_of(error, backend=backend.name, peer=peer)
            break
    return Moving(nbytes, blocks, reason, unsettled, tuple(running), tuple(strays))


class _Failed(TransferError):
    """Transfers failed.

    Attributes:
        running: Those that have not ended.
        strays: Those that failed and are not settled.
    """

    def __init__(self, what: str, cause: str, running: list[Transfer], strays: list[Transfer]) -> None:
        super().__init__(what, cause=cause)
        self.running = running
        self.strays = strays


def _ends(backend: Backend, cancelled: Flag, running: list[Transfer]) -> Generator[Until, None, list[Transfer]]:
    """Wait until transfers have ended, or the room was cancelled. Returns those that still run. Raises as `_left`."""
    while (running := _left(backend, running)) and not cancelled.raised:
        yield Until.ENDED
    return running


def _left(backend: Backend, running: list[Transfer]) -> list[Transfer]:
    """The transfers that have not ended. Each outcome is read once, since a thread of the backend may set it meanwhile.

    Raises:
        _Failed: One of the others failed.
        BackendDefect: An outcome is no `Outcome`.
    """
    left: list[Transfer] = []
    failed: list[tuple[Transfer, Outcome]] = []
    for transfer in running:
        outcome = transfer.outcome
        if outcome is None:
            left.append(transfer)
        elif not isinstance(outcome, Outcome):
            raise BackendDefect.returned(backend, "`Transfer.outcome` is", outcome, "an Outcome")
        elif not outcome.ok:
            failed.append((transfer, outcome))
    if failed:
        strays = [transfer for transfer, outcome in failed if outcome.unsettled]
        raise _Failed(f"backend {backend.name!r} could not move a batch", failed[0][1].reason, left, strays)
    return left


def _running(transfers: list[Transfer]) -> list[Transfer]:
    """The transfers that have no outcome, not even a wrong one."""
    return [each for each in transfers if each.outcome is None]
