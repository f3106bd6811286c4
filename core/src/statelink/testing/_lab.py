"""What the clauses of one test class share: processes, and one connected pair that they leave intact."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from statelink.backend import Fence, Op, Side

from . import _inside, _rooms
from ._bench import LAYOUT, Bench, End, Pair, Subject
from ._memory import MIB
from ._process import ARENA, Pool, Worker
from ._rooms import LinkEnd

__all__ = ["FAILED", "NOT_APPLICABLE", "Lab", "Suite", "needs"]

FAILED = pytest.StashKey[bool]()
"""Whether a test failed, for the fixtures that clean up after it."""
NOT_APPLICABLE = "not applicable: "
"""How the reason of a skip begins that no machine can change."""


LARGE = 128 * MIB
"""Bytes of memory that are not kept for the next test."""


FOR_LINKS = ARENA - 64 * MIB
"""Where in a worker's memory the pages of links begin."""


def needs(declared: bool, what: str) -> None:
    """Leave a clause out that this backend's declaration makes pointless."""
    if not declared:
        pytest.skip(f"{NOT_APPLICABLE}{what}")


class Lab(Bench):
    """Makes ends in the processes that one test class shares, and forgets them after each test.

    Args:
        subject: The backend.
        pool: Where processes come from.
        processes: In how many of them the two ends of a pair live.
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
        """The pair that is shared; whoever takes it leaves it connected."""
        self.ready()
        if self._pair is None:
            self._pair = self.pair()
            self._floor = dict(self._used)
            self._ends = [end for end in self._ends if end not in (self._pair.source, self._pair.target)]
        return self._pair

    def ready(self) -> None:
        """Have as many processes as are needed, alive."""
        if not all(worker.idle for worker in self._all()):
            self.spoil()
        self.workers = [*self.workers, *(self._pool.take() for _ in range(self.processes - len(self.workers)))]

    def borrow(self) -> Worker:
        """One more process, for this test; it may be killed."""
        needs(self.processes > 1, "this backend moves bytes inside one process")
        worker = self._pool.take()
        self._borrowed.append(worker)
        return worker

    def end(self, number: int = 0, *arguments: Any, **named: Any) -> End:
        """An end in one of the processes; forgotten after the test."""
        end = super().end(number, *arguments, **named)
        self._ends.append(end)
        return end

    def place(self, number: int) -> Worker:
        """The process for one more link: where few links may share one, others stand in for it when it is full."""
        most = self.subject.capabilities.links_per_process
        more = self._more.setdefault(number, [])
        for worker in (self.workers[number], *more):
            if most is None or self._links_in(worker) < most:
                return worker
        more.append(self._pool.take())
        return more[-1]

    def ranks(self, number: int, count: int) -> dict[Worker, list[int]]:
        """In which process each of so many ranks has its link; until the end of this test."""
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
        """A prefill and a decode that are shared; whoever takes them leaves them open."""
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
        """Close the shared links; whether they came to rest within so many seconds."""
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
        """Start anew, after a test that failed."""
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
    """What a test class states of its backend, and the fixtures of its clauses."""

    is_statelink_suite: ClassVar[bool] = True

    backend: ClassVar[str]
    """The backend's entry-point name. Its package has to be installed."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Its options."""
    config: ClassVar[Mapping[str, Any]] = {}
    """What links are configured with besides."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables of the processes that it runs in."""
    processes: ClassVar[int] = 2
    """In how many processes two ends live: 1 for a backend that reaches no other process."""
    patience: ClassVar[float] = 30.0
    """Seconds within which a failure has to show, such as the death of a peer."""
    memory: ClassVar[str] = "dram"
    """Kind of the memory that is moved: the host's, or that of a device such as ``cuda:0``. The option
    ``--statelink-memory`` goes before it."""
    allocator: ClassVar[str] = ""
    """What allocates memory of a device, as ``module:name``; torch if empty. It is called with the kind and a number of
    bytes, and what it returns has an ``address``, ``write(at, data)`` and ``read(at, data)`` for arrays of bytes."""
    simulator: ClassVar[bool] = False
    """Whether what moves the bytes is a stand-in for the real library."""
    deviations: ClassVar[Mapping[str, str]] = {}
    """Clauses that this backend is known to break, by the name of the test, each with the reason. One that it does
    not break any more fails."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each clause the operations and sides that the backend declares."""
        try:
            declared = _inside.kind_of(type(self).backend).capabilities
            ops = sorted(declared.ops, key=lambda op: op.value)
            fences = sorted(declared.fences.items(), key=lambda item: (item[0][0].value, item[0][1].value))
        except Exception:  # the clauses say so, one by one
            ops, fences = [Op.WRITE], []
        if "op" in metafunc.fixturenames:
            metafunc.parametrize("op", ops, ids=lambda op: op.value)
        if "main_op" in metafunc.fixturenames:  # what takes long is done in one direction
            metafunc.parametrize("main_op", ops[-1:], ids=lambda op: op.value)
        for name, fence in (("fenced_by_owner", Fence.OWNER), ("fenced_by_mover", Fence.MOVER)):
            if name in metafunc.fixturenames:
                pairs = [pair for pair, who in fences if who is fence]
                metafunc.parametrize(name, pairs, ids=lambda pair: f"{pair[0].value}-{pair[1].value}")

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
        """Two connected ends, which other clauses use after this one."""
        return lab.pair_for_all()
