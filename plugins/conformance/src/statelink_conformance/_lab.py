"""What the clauses of one test class share: processes, and one connected pair that they must leave intact."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from statelink.backend import Side

from . import _inside, _rooms
from ._bench import LAYOUT, Bench, End, Pair, Subject
from ._memory import MIB
from ._rooms import LinkEnd
from ._workers import ARENA, Pool, Worker

__all__ = ["FAILED", "NOT_APPLICABLE", "Lab", "Suite", "needs"]

FAILED = pytest.StashKey[bool]()
"""Whether a test failed, for the fixtures that clean up after it."""
NOT_APPLICABLE = "not applicable: "
"""Prefix of the reason of a skip that no machine can change."""


LARGE = 128 * MIB
"""Bytes of memory that are given back after each test."""


FOR_LINKS = ARENA - 64 * MIB
"""Offset of the links' pages in a worker's memory."""


def needs(declared: bool, what: str) -> None:
    """Skip a clause that makes no sense with this backend's declaration."""
    if not declared:
        pytest.skip(f"{NOT_APPLICABLE}{what}")


class Lab(Bench):
    """Makes ends in the processes that one test class shares, and forgets them after each test.

    Args:
        subject: The backend.
        pool: The pool of processes.
        processes: Number of processes for the two ends of a pair.
    """

    def __init__(self, subject: Subject, pool: Pool, processes: int) -> None:
        super().__init__(subject, [])
        self.processes = processes
        self.verdicts: dict[str, dict[str, str]] = {}
        self._pool = pool
        self._borrowed: list[Worker] = []
        self._pair: Pair | None = None
        self._links: tuple[LinkEnd, LinkEnd] | None = None
        self._ends: list[End] = []
        self._ranks: list[Worker] = []
        self._more: dict[int, list[Worker]] = {}
        self._floor: dict[int, int] = {}

    def pair_for_all(self) -> Pair:
        """The shared pair. A clause must leave it connected."""
        self.ready()
        if self._pair is None:
            self._pair = self.pair()
            self._floor = dict(self._used)
            self._ends = [end for end in self._ends if end not in (self._pair.source, self._pair.target)]
        return self._pair

    def ready(self) -> None:
        """Provide as many running processes as are needed."""
        if not all(worker.idle for worker in self._all()):
            self.spoil()
        self.workers = [*self.workers, *(self._pool.take() for _ in range(self.processes - len(self.workers)))]

    def borrow(self) -> Worker:
        """One more process for this test. It may be killed."""
        needs(self.processes > 1, "this backend moves bytes inside one process")
        worker = self._pool.take()
        self._borrowed.append(worker)
        return worker

    def end(self, number: int = 0, *arguments: Any, **named: Any) -> End:
        """An end in one of the processes. It is forgotten after the test."""
        end = super().end(number, *arguments, **named)
        self._ends.append(end)
        return end

    def place(self, number: int) -> Worker:
        """The process for one more link. If a process may have few links and is full, another process replaces it."""
        most = self.subject.capabilities.links_per_process
        more = self._more.setdefault(number, [])
        for worker in (self.workers[number], *more):
            if most is None or self._links_in(worker) < most:
                return worker
        more.append(self._pool.take())
        return more[-1]

    def ranks(self, number: int, count: int) -> dict[Worker, list[int]]:
        """The process for the link of each rank, until the end of this test."""
        found: dict[Worker, list[int]] = {}
        for rank in range(count):
            worker = self.place(number % len(self.workers))
            self._ranks.append(worker)
            found.setdefault(worker, []).append(rank)
        return found

    def elsewhere(
        self, worker: Worker, link: str, layout: Sequence[Sequence[int]] = LAYOUT, *, side: Side = Side.SOURCE
    ) -> End:
        """An end in a borrowed process."""
        return End(self.subject, worker, link, layout, side=side)

    def links_for_all(self) -> tuple[LinkEnd, LinkEnd]:
        """A shared prefill and decode. A clause must leave them open."""
        if self._links is None:
            source, target = self.place(0), self.place(len(self.workers) - 1)
            prefill = LinkEnd(self.subject, source, "prefill", "shared-prefill", FOR_LINKS)
            self._links = prefill, LinkEnd(self.subject, target, "decode", "shared-decode", FOR_LINKS + 32 * MIB)
        return self._links

    @contextlib.contextmanager
    def links_of_both_roles(self) -> Iterator[tuple[LinkEnd, LinkEnd]]:
        """Two links of the role ``both``, for this test."""
        opened = []
        for number, place in enumerate((0, len(self.workers) - 1)):
            worker = self.place(place)
            base = FOR_LINKS + (16 + 32 * number) * MIB
            opened.append(LinkEnd(self.subject, worker, "both", f"both-{number}", base))
            self._ranks.append(worker)
        yield opened[0], opened[1]
        for each in opened:
            assert each.close(), f"{each.key} did not come to rest"

    def close_links(self, patience: float) -> bool:
        """Close the shared links. Returns whether they quiesced within ``patience`` seconds."""
        links, self._links = self._links or (), None
        return all([link.worker(_rooms.close, [link.key], patience) for link in links])

    def clean(self) -> None:
        """Close what this test opened."""
        borrowed, self._borrowed = self._borrowed, []
        ends, self._ends, self._ranks = self._ends, [], []
        self._pool.give_back(borrowed)
        by_worker = [(worker, [end.link for end in ends if end.worker is worker]) for worker in self._all()]
        used = [(worker, links) for worker, links in by_worker if links]
        for worker, links in used:
            worker.start(_inside.forget, links)
        for worker, _ in used:
            worker.result()
        if max(self._used.values(), default=0) > LARGE:
            for worker in self._all():
                worker.arena.discard(FOR_LINKS)
        self._used = dict(self._floor) if self._pair else {}

    def spoil(self) -> None:
        """Start with new objects after a failed test."""
        borrowed, self._borrowed = [*self._borrowed, *self._all()], []
        self._ends, self._ranks, self._more, self._pair, self._links = [], [], {}, None, None
        self.workers = []
        self._used = {}
        self._pool.give_back(borrowed)

    def _all(self) -> list[Worker]:
        return [*self.workers, *(worker for more in self._more.values() for worker in more)]

    def _links_in(self, worker: Worker) -> int:
        pair = (self._pair.source, self._pair.target) if self._pair else ()
        return [*self._ranks, *(each.worker for each in (*self._ends, *pair, *(self._links or ())))].count(worker)


class Suite:
    """What a test class states about its backend, and the fixtures of its clauses."""

    is_statelink_suite: ClassVar[bool] = True

    backend: ClassVar[str]
    """The backend's entry-point name. Its package has to be installed."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Its options."""
    config: ClassVar[Mapping[str, Any]] = {}
    """Further keys of the links' configuration."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables of its processes."""
    processes: ClassVar[int] = 2
    """Number of processes for two ends: 1 for a backend that reaches no other process."""
    patience: ClassVar[float] = 30.0
    """Seconds within which a failure must be reported, such as the death of a peer."""
    memory: ClassVar[str] = "dram"
    """Kind of the memory that is moved: host memory, or that of a device such as ``cuda:0``. The option
    ``--statelink-memory`` takes precedence."""
    allocator: ClassVar[str] = ""
    """Function that allocates memory of a device, as ``module:name``; torch if empty. It is called with the kind and
    a number of bytes. Its result has an ``address``, and ``write(at, data)`` and ``read(at, data)`` for arrays."""
    simulator: ClassVar[bool] = False
    """Whether a stand-in for the real library moves the bytes."""
    moved_by: ClassVar[str] = ""
    """What moves the bytes, for the report: the library, its version, and what it runs on."""
    deviations: ClassVar[Mapping[str, str]] = {}
    """Clauses that this backend is known to break: name of the test to reason. If the backend keeps such a clause, the
    clause fails, so that the entry is removed."""

    @pytest.fixture
    def lab(self, request: pytest.FixtureRequest, statelink_lab: Lab) -> Iterator[Lab]:
        """Ends in processes of their own."""
        statelink_lab.ready()
        yield statelink_lab
        if request.node.stash.get(FAILED, False):
            statelink_lab.spoil()
        else:
            statelink_lab.clean()

    @pytest.fixture
    def pair(self, lab: Lab) -> Pair:
        """Two connected ends. Other clauses use them after this one."""
        return lab.pair_for_all()
