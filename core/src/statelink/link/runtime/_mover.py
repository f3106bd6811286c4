"""Moves what a push lists, in batches that somebody else submits, so that several pushes can take turns."""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from statelink.backend import Backend, Batch, Blocks, Outcome, RegionTable, Side, Transfer
from statelink.errors import Reason, StatelinkError, TransferError
from statelink.plan import Cutter

from ._failure import BackendDefect, reason_of

if TYPE_CHECKING:
    from ._flag import Flag

__all__ = ["Moving", "Steps", "Until", "move", "submit_together", "submitted"]

Result = TypeVar("Result")


class Until(enum.Enum):
    """What something waits for that moves."""

    ENDED = "ended"
    """All transfers of its batches have ended, or one has failed."""
    WOKEN = "woken"
    """Somebody wakes it."""


Steps = Generator[Batch | Until, Transfer | None, Result]
"""What waits without a thread. It yields a batch, or what it waits for. A batch is answered by sending its transfer, by
sending ``None`` if nobody submits it because the room was cancelled, or by throwing what ``submit`` raised."""


class Moving(NamedTuple):
    """What became of a move.

    Attributes:
        nbytes: Bytes moved.
        blocks: Blocks moved.
        reason: Why it failed, or ``None``.
        unsettled: Sides on which writes may be in flight although there is no transfer to poll: ``submit`` raised what
            it must not.
        pending: Transfers that had not ended when the move was given up.
        strays: Transfers that failed and are not settled. The backend may settle them later.
    """

    nbytes: int
    blocks: int
    reason: Reason | None
    unsettled: frozenset[Side] = frozenset()
    pending: tuple[Transfer, ...] = ()
    strays: tuple[Transfer, ...] = ()


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


def submitted(backend: Backend, peer: str, batch: Batch) -> Transfer | BaseException:
    """Submit a batch to a peer. Blocks as the backend's ``submit`` does.

    Returns:
        Its transfer; or what ``submit`` raised, which is a `BackendDefect` unless the contract allows it.
    """
    try:
        made: object = backend.submit(peer, batch)
    except StatelinkError as error:
        return error  # by contract, nothing of the batch was or will be moved
    except BaseException as error:
        defect = BackendDefect()
        defect.__cause__ = error
        return defect
    if isinstance(made, Transfer):
        return made
    return BackendDefect.returned(backend, "`submit` returned", made, "a Transfer")


def submit_together(backend: Backend, peer: str, batches: Sequence[Batch]) -> list[Transfer | BaseException]:
    """Submit batches to a peer. Several go as one. Blocks as the backend's ``submit`` does.

    If the backend refuses them as one, they are submitted one by one, so that a bad one fails alone.

    Args:
        backend: The backend.
        peer: Link name of the destination.
        batches: Writes, all of which were checked against the same tables. If the backend does not declare
            ``joins_rooms``, at most one.

    Returns:
        For each batch what `submitted` returns. Batches may share a transfer.
    """
    if len(batches) > 1:
        blocks = Blocks.concatenate([each.blocks for each in batches])
        answer = submitted(backend, peer, Batch(blocks, 0, 0, batches[0].checked))
        if not isinstance(answer, StatelinkError):
            return [answer] * len(batches)
    return [submitted(backend, peer, each) for each in batches]


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
