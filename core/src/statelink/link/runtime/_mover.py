"""Gives batches to a backend in bounded slices, so that an abort does not wait for a long copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from statelink.backend import Backend, Batch, Blocks, Outcome, RegionTable, Side, Transfer
from statelink.errors import Reason, StatelinkError, TransferError

from ._failure import BackendDefect, reason_of

if TYPE_CHECKING:
    from ._flag import Flag

__all__ = ["Moving", "Steps", "move", "submit_together", "submitted"]

Result = TypeVar("Result")
Steps = Generator[float | Batch | None, Transfer | None, Result]
"""What waits without a thread. It yields a pause in seconds; ``None`` if it has to be woken; or a batch. A batch is
answered by sending its transfer, or by throwing what ``submit`` raised."""

FIRST_NAP, NAP, LONGEST_NAP = 20e-6, 1e-3, 0.05
"""Seconds between two polls of running transfers. They begin with the first number and double up to the second. After
that they grow with the time that went by, up to the third, so that many stalled peers cost little."""
NAP_SHARE = 1 / 64
"""How long such a nap may be, as a fraction of the time that this wait took so far."""


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
    slice_bytes: int,
    cancelled: Flag,
    wake: Callable[[], object],
) -> Steps[Moving]:
    """Write batches to a peer and wait until they are visible there.

    Yields each batch that has to be submitted. Yields a pause in seconds while it waits for transfers that have to be
    polled, and 0 between two slices, as a sign of life. Yields ``None`` where it has to be resumed: while transfers run
    that end unpolled, of which ``wake`` tells, and where no transfer runs and the next batch is not there yet.

    Args:
        backend: The backend.
        peer: Link name of the destination.
        parts: Batches of blocks. ``None`` means: wait until every batch before is visible; the next may take a while.
        room: The room id.
        generation: The generation of its use.
        tables: Region tables of the source and of the destination.
        slice_bytes: Most bytes given to the backend at once.
        cancelled: Set by the control thread when the room failed. Then no transfer is started or waited for any more.
        wake: Called on any thread when a transfer has ended that ends unpolled. Must not block.
    """
    wait = partial(_wait, backend, cancelled, wake)
    limits = backend.capabilities
    checked = tables[0].key, tables[1].key
    most = min(limits.max_bytes, slice_bytes)
    running: list[Transfer] = []
    nbytes = blocks = 0
    reason: Reason | None = None
    unsettled: frozenset[Side] = frozenset()
    strays: list[Transfer] = []
    try:
        for part in parts:
            if part is None:
                if running:
                    running, failure = yield from wait(running, len(running))
                    if failure is not None:
                        raise failure
                elif not cancelled.raised:  # nothing would resume it after it was cancelled
                    yield None
                if cancelled.raised:
                    return Moving(nbytes, blocks, reason, pending=tuple(running))
                continue
            tables[0].check("here", part.source, part.nbytes, part.source_region)
            tables[1].check("by the peer", part.target, part.nbytes, part.target_region)
            total = part.total
            pieces: Iterable[Blocks] = (part,)
            if total > most or not 0 < len(part.nbytes) <= limits.max_blocks:
                pieces = part.pieces(limits.max_blocks, most)
            for piece in pieces:
                if blocks:
                    yield 0.0
                while len(running) >= limits.max_transfers:
                    running, failure = yield from wait(running, len(running) - limits.max_transfers + 1)
                    if failure is not None:
                        raise failure
                    if cancelled.raised:
                        return Moving(nbytes, blocks, reason, pending=tuple(running))
                if cancelled.raised:
                    return Moving(nbytes, blocks, reason, pending=tuple(running))
                transfer = yield Batch(piece, room, generation, checked)
                assert transfer is not None, "a batch is answered with its transfer"
                running.append(transfer)
                nbytes += total if piece is part else piece.total
                blocks += len(piece.nbytes)
    except GeneratorExit:
        raise  # this generator was closed: its result is not needed
    except BaseException as error:
        reason = reason_of(error, backend=backend.name, peer=peer)
        if isinstance(error, BackendDefect):
            unsettled, running = frozenset(Side), _running(running)
        elif isinstance(error, _Failed):
            strays += error.strays
    try:
        while running and not cancelled.raised:
            running, failure = yield from wait(running, len(running))
            if failure is not None:
                reason = reason or reason_of(failure, backend=backend.name, peer=peer)
                strays += failure.strays
    except GeneratorExit:
        raise
    except BaseException as error:  # ``poll`` raised: it is not known how the transfers end; they are polled later
        if isinstance(error, BackendDefect):
            unsettled, running = frozenset(Side), _running(running)
        reason = reason or reason_of(error, backend=backend.name, peer=peer)
    return Moving(nbytes, blocks, reason, unsettled, tuple(running), tuple(strays))


class _Failed(TransferError):
    """Transfers failed; ``strays`` are those that are not settled."""

    def __init__(self, what: str, cause: str, strays: tuple[Transfer, ...]) -> None:
        super().__init__(what, cause=cause)
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


def _wait(
    backend: Backend, cancelled: Flag, wake: Callable[[], object], running: list[Transfer], ends: int
) -> Steps[tuple[list[Transfer], _Failed | None]]:
    """Wait until ``ends`` transfers ended, one failed, or the room was cancelled.

    Returns the transfers that still run, and the failure if there was one. Raises what `_split` raises.
    """
    unpolled = backend.capabilities.ends_unpolled
    began, nap = 0.0, FIRST_NAP
    while True:
        ended, remaining = _split(backend, running)
        if len(ended) < ends and not unpolled:  # even if some ended: a library may move others only while it is polled
            backend.poll(remaining)
            ended, remaining = _split(backend, running)
        for _, outcome in ended:
            if not outcome.ok:
                return remaining, _failure(backend, ended, outcome.reason)
        if len(ended) >= ends or cancelled.raised:
            return remaining, None
        if unpolled:
            for transfer in remaining:
                transfer.notify(wake)
            yield None
            continue
        began = began or time.monotonic()
        yield nap
        nap = min(2 * nap, max(NAP, NAP_SHARE * (time.monotonic() - began)), LONGEST_NAP)


def _failure(backend: Backend, ended: list[tuple[Transfer, Outcome]], reason: str) -> _Failed:
    """The error for transfers that have ended, if some of them failed; the first of these says the reason."""
    strays = tuple(transfer for transfer, outcome in ended if not outcome.ok and outcome.unsettled)
    return _Failed(f"backend {backend.name!r} could not move a batch", reason, strays)


def _running(transfers: list[Transfer]) -> list[Transfer]:
    """The transfers that have no outcome, not even a wrong one."""
    return [each for each in transfers if each.outcome is None]


def _split(backend: Backend, running: list[Transfer]) -> tuple[list[tuple[Transfer, Outcome]], list[Transfer]]:
    """Split transfers into those that have ended, with their outcomes, and the others.

    Each outcome is read once, since a thread of the backend may set it meanwhile.

    Raises:
        BackendDefect: An outcome is no `Outcome`.
    """
    ended: list[tuple[Transfer, Outcome]] = []
    remaining: list[Transfer] = []
    for transfer in running:
        outcome = transfer.outcome
        if outcome is None:
            remaining.append(transfer)
        elif isinstance(outcome, Outcome):
            ended.append((transfer, outcome))
        else:
            raise BackendDefect.returned(backend, "`Transfer.outcome` is", outcome, "an Outcome")
    return ended, remaining
