"""Two connected backends, memory whose every byte is known, and the expected result of a move."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from statelink.backend import Backend, Blocks, Capabilities, Fence, Outcome, Region, Side

from . import _inside
from ._inside import Move
from ._memory import MIB, POISON, Array
from ._saying import BYTES, all_moved, given_reason, same
from ._worker import Finding

if TYPE_CHECKING:
    from typing_extensions import Self

    from ._workers import Worker

__all__ = ["LAYOUT", "NOISE", "Bench", "End", "Pair", "Subject", "blocks_of", "scattered"]

U64 = npt.NDArray[np.uint64]

LAYOUT = ((8 * MIB + 1, 350_001, 8191), (100_000,))
"""Sizes of the regions of each side: three side by side with borders at odd addresses, and one elsewhere."""

NOISE = np.random.default_rng(7).integers(0, 255, 16 * MIB, dtype=np.uint8)
NOISE += NOISE >= POISON  # so that each byte that is missing is seen

TOP = 1 << 64

EARLY = "Let a transfer succeed when the other side has its bytes, not when they are sent or queued."

REVOKED = "Let the transfer of `revoke` succeed once nothing more can land; an unknown grant counts as revoked."

NEEDLE, LEAST = 64, 8
"""Most and fewest bytes by which a block is found again."""

Row = tuple[int, int, int, int, int]
"""A block: source region, offset in it, target region, offset in it, length."""


class Subject(NamedTuple):
    """The backend under test.

    Attributes:
        name: The backend's entry-point name.
        kind: Its class.
        options: Its options.
        patience: Most seconds for anything that takes time.
        memory: Kind of the memory that is moved.
        config: Further keys of the links' configuration.
        state_type: State type of a link's pages.
    """

    name: str
    kind: type[Backend]
    options: Mapping[str, Any]
    patience: float
    memory: str = "dram"
    config: Mapping[str, Any] = MappingProxyType({})
    state_type: str = "kv"

    @property
    def capabilities(self) -> Capabilities:
        """What it declares."""
        return self.kind.capabilities


class End:
    """One backend object in a worker. This process shares the memory of its regions.

    Args:
        subject: The backend.
        worker: The process of the backend.
        link: Name of its link.
        layout: Sizes of its regions. The regions of one list are side by side.
        base: Where they start in the worker's memory.
        side: Its side in every move: prefill's links are sources, and decode's are targets.
    """

    def __init__(
        self,
        subject: Subject,
        worker: Worker,
        link: str,
        layout: Sequence[Sequence[int]] = LAYOUT,
        base: int = 0,
        *,
        side: Side,
    ) -> None:
        self.subject = subject
        self.worker = worker
        self.link = link
        self.role = "prefill" if side is Side.SOURCE else "decode"
        worker.address = worker.address or worker(_inside.address)
        self.starts: list[int] = []
        self.arrays: list[Array] = []
        at = base
        for sizes in layout:
            for size in sizes:
                self.starts.append(at)
                self.arrays.append(worker.arena.bytes[at : at + size])
                at += size
            at += 4096 - at % 4096
        self.span = (base, at)
        self.regions = tuple(
            Region(worker.address + start, len(array), worker.memory)
            for start, array in zip(self.starts, self.arrays, strict=True)
        )
        self.descriptor = b""

    def open(self) -> End:
        """Make the backend, and register the regions."""
        self.construct()
        self.call(_inside.register, self.regions)
        self.descriptor = self.call(_inside.descriptor)
        return self

    def construct(self) -> None:
        """Only make the backend."""
        self.call(_inside.construct, self.role, self.subject.name, dict(self.subject.options))

    def call(self, function: Any, *arguments: Any) -> Any:
        """Call a function in the worker. Its first argument is this link's name."""
        return self.worker(function, self.link, *arguments)

    def connect(self, peer: End) -> Self:
        """Make a peer known here."""
        self.call(_inside.connect, peer.link, peer.descriptor, peer.regions)
        return self

    def disconnect(self, peer: End) -> None:
        """Forget a peer here."""
        self.call(_inside.disconnect, peer.link)

    @property
    def memory(self) -> Array:
        """All of its regions, and the gaps between them."""
        return self.worker.arena.bytes[self.span[0] : self.span[1]]


class Pair:
    """A source and a target of bytes, connected in both directions.

    Attributes:
        source: The end from which bytes come.
        target: The end to which they go.
    """

    def __init__(self, source: End, target: End) -> None:
        self.source = source
        self.target = target
        self.subject = source.subject

    def connect(self) -> Pair:
        """Connect both sides."""
        self.source.connect(self.target)
        self.target.connect(self.source)
        return self

    def fill(self, seed: int = 0) -> None:
        """Fill the source with noise and the target with poison."""
        self.target.memory[:] = POISON
        source, first = self.source.memory, seed % 4096
        for start in range(0, len(source), 8 * MIB):
            part = source[start : start + 8 * MIB]
            part[:] = NOISE[first : first + len(part)]

    def needs_grants(self) -> bool:
        """Whether the owner of the target grants what may be written."""
        return self.subject.capabilities.target is Fence.OWNER

    def grant(self, blocks: Blocks, room: int = 1, generation: int = 1) -> None:
        """Grant the target's ranges of blocks, if this backend needs grants."""
        if self.needs_grants():
            order = np.argsort(blocks.target)
            ranges = blocks.target[order], blocks.nbytes[order]
            self.target.call(_inside.grant, self.source.link, room, generation, *ranges)

    def revoke(self, room: int = 1, generation: int = 1) -> Outcome:
        """Take a grant back."""
        patience = self.subject.patience
        outcome: Outcome = self.target.call(_inside.revoke, self.source.link, room, generation, patience)
        return outcome

    def take_back(self, room: int = 1, generation: int = 1) -> None:
        """Revoke a grant. This must not fail."""
        outcome = self.revoke(room, generation)
        if not outcome.ok:
            given_reason(outcome.reason, "a revoke failed")
            raise Finding(f"a revoke failed: {outcome.reason}", REVOKED, general=True)

    def order(self, blocks: Blocks, room: int = 1, generation: int = 1) -> Move:
        """A move, in the form that the mover's worker takes."""
        return Move(self.source.link, self.target.link, blocks, room, generation)

    def move(self, blocks: Blocks, room: int = 1, generation: int = 1) -> list[Outcome]:
        """Move blocks without a grant."""
        order = self.order(blocks, room, generation)
        outcomes: list[Outcome] = self.source.worker(_inside.move, order, self.subject.patience)
        return outcomes

    def carry(self, blocks: Blocks, room: int = 1, generation: int = 1) -> None:
        """Grant, move, and check every byte of both sides."""
        expected, before = self.expected(blocks), self.source.memory.copy()
        self.grant(blocks, room, generation)
        outcomes = self.move(blocks, room, generation)
        if self.needs_grants():
            self.take_back(room, generation)
        all_moved(outcomes)
        self.verify(expected, blocks)
        same(self.source.memory, before, "the source")

    def works(self) -> None:
        """Check that a small move succeeds."""
        self.fill(99)
        self.carry(self.blocks([(0, 3, 0, 5, 4097), (3, 1, 3, 2, 99)]), room=1000)

    def works_small(self) -> None:
        """Check that a small move between the first regions succeeds, with any layout."""
        self.fill(98)
        self.carry(self.blocks([(0, 3, 0, 5, 97)]), room=1001)

    def expected(self, blocks: Blocks, onto: Array | None = None) -> Array:
        """The expected memory of the target after a move, from its current or given bytes."""
        wanted, source = self.target.memory.copy() if onto is None else onto, np.asarray(self.source.memory)
        zero = np.uint64(self.source.worker.address + self.source.span[0])
        origin = np.uint64(self.target.worker.address + self.target.span[0])
        starts, ends = (blocks.source - zero).tolist(), (blocks.target - origin).tolist()
        for here, there, nbytes in zip(starts, ends, blocks.nbytes.tolist(), strict=True):
            wanted[there : there + nbytes] = source[here : here + nbytes]
        return wanted

    def verify(self, expected: Array, blocks: Blocks | None = None) -> None:
        """Check every byte of the target's memory. A failure names one of the blocks that is wrong."""
        wrong = np.flatnonzero(self.target.memory != expected)
        if len(wrong):
            words = f"{len(wrong)} bytes of the target are not what they should be, the first at {wrong[0]}"
            self.target.worker(_inside.rest, _inside.MOMENTS_SECONDS)
            if (self.target.memory == expected).all():
                raise Finding(f"{words}: they came after their move was reported done", EARLY)
            raise Finding(words + self._why(expected, wrong, blocks), BYTES, general=True)

    def _why(self, expected: Array, wrong: npt.NDArray[np.intp], blocks: Blocks | None) -> str:
        """What is wrong with these bytes: they lie elsewhere, they are others, or there are none."""
        if blocks is None:
            return ""
        found = np.asarray(self.target.memory)
        starts = blocks.target.astype(np.int64) - (self.target.worker.address + self.target.span[0])
        after = np.append(wrong, len(found))[np.searchsorted(wrong, starts)]  # the first wrong byte from each start on
        bad = np.flatnonzero(after < starts + blocks.nbytes.astype(np.int64))
        if not len(bad):
            return ": they are outside every block"
        whole = found.tobytes(), expected.tobytes()
        for number in (int(bad[0]), int(bad[-1])):  # what later blocks have overwritten is found no more
            start, nbytes = int(starts[number]), int(blocks.nbytes[number])
            first = whole[1][start : start + min(nbytes, NEEDLE)]
            which = f"block {number} of {blocks.count} has {nbytes} bytes for {self._place(start)}"
            if whole[0].startswith(first, start):
                return f": a block begins as it should, and goes on otherwise\n{which}"
            at = _elsewhere(first, *whole) if len(first) >= LEAST else -1
            if at >= 0:
                return f": right bytes at a wrong place\n{which}, and its first bytes are at {self._place(at)}"
        blank = whole[0][start : start + len(first)] == bytes([POISON]) * len(first)
        what = "nothing was written" if blank else "other bytes were written"
        nowhere = ", and its first bytes are nowhere in the target's memory" if len(first) >= LEAST else ""
        return f": {what} where a block has to be\n{which}{nowhere}"

    def _place(self, at: int) -> str:
        """An address of the target's memory, from its offset."""
        at += self.target.span[0]
        inside = (
            f"byte {at - start} of region {number}"
            for number, (start, array) in enumerate(zip(self.target.starts, self.target.arrays, strict=True))
            if start <= at < start + len(array)
        )
        return f"address {self.target.worker.address + at:#x}, {next(inside, 'outside every region')}"

    def untouched(self, why: str = "bytes were written that should not") -> None:
        """Check that nothing was written to the target."""
        wrong = np.flatnonzero(self.target.memory != POISON)
        assert not len(wrong), f"{why}: {len(wrong)} of them, the first at {wrong[0]}"

    def blocks(self, rows: Sequence[Row]) -> Blocks:
        """Blocks from offsets in regions."""
        return blocks_of(self.source.regions, self.target.regions, rows)


def _elsewhere(part: bytes, found: bytes, expected: bytes) -> int:
    """Where bytes were found that were not expected there; -1 for nowhere."""
    at = found.find(part)
    while at >= 0 and expected[at : at + len(part)] == part:
        at = found.find(part, at + 1)
    return at


def blocks_of(source: Sequence[Region], target: Sequence[Region], rows: Sequence[Row]) -> Blocks:
    """Blocks between two region tables, from offsets in regions. An offset may be negative."""
    table = np.array(
        [
            ((source[a].address + at) % TOP, (target[b].address + there) % TOP, nbytes, a, b)
            for a, at, b, there, nbytes in rows
        ],
        np.uint64,
    ).reshape(-1, 5)
    columns = [np.ascontiguousarray(column) for column in table.T]
    return Blocks(columns[0], columns[1], columns[2], columns[3].astype(np.uint32), columns[4].astype(np.uint32))


def scattered(pair: Pair, count: int, nbytes: int, region: int, seed: int = 0) -> Blocks:
    """Blocks of one length at unaligned addresses, in random order. They do not overlap at the target."""
    rng = np.random.default_rng([seed, count, nbytes])
    room = pair.target.regions[region].nbytes
    step = room // count
    assert step >= nbytes, "the region is too small for so many blocks"
    order = rng.permutation(count).astype(np.uint64)
    target = order * np.uint64(step) + rng.integers(0, step - nbytes + 1, count, dtype=np.uint64)
    source = rng.integers(0, room - nbytes + 1, count, dtype=np.uint64)
    return Blocks(
        source + np.uint64(pair.source.regions[region].address),
        target + np.uint64(pair.target.regions[region].address),
        np.full(count, nbytes, np.uint64),
        np.full(count, region, np.uint32),
        np.full(count, region, np.uint32),
    )


class Bench:
    """Makes ends in workers, for one test.

    Args:
        subject: The backend.
        workers: Processes for the ends.
    """

    def __init__(self, subject: Subject, workers: Sequence[Worker]) -> None:
        self.subject = subject
        self.workers = workers
        self._names = itertools.count()
        self._used: dict[int, int] = {}

    def end(
        self,
        number: int = 0,
        layout: Sequence[Sequence[int]] = LAYOUT,
        *,
        link: str = "",
        side: Side | None = None,
    ) -> End:
        """An end in one of the processes. It is not open. No two ends share memory.

        By default it is a source in the first process, and a target in another one.
        """
        side = side or (Side.TARGET if number else Side.SOURCE)
        number %= len(self.workers)
        name = link or f"end-{next(self._names)}"
        end = End(self.subject, self.place(number), name, layout, self._used.get(number, 0), side=side)
        self._used[number] = end.span[1]
        return end

    def place(self, number: int) -> Worker:
        """The process for one more link."""
        return self.workers[number]

    def pair(self, layout: Sequence[Sequence[int]] = LAYOUT) -> Pair:
        """Two ends, open and connected."""
        return Pair(self.end(0, layout).open(), self.end(1, layout).open()).connect()
