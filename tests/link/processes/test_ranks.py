"""One process a rank, several ranks a side, over every backend; every byte of every decode rank is looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.helpers.fleet import Fleet
from tests.helpers.pools import Aux, Component, Kv, Mamba

if TYPE_CHECKING:
    from tests.link.conftest import TwoEngines

LAYERS = 6
TOKENS, CUT = 75, 32


class Shape(NamedTuple):
    """A parallel layout: TP width, and the number of layers of each pipeline stage."""

    tp: int
    stages: tuple[int, ...] = (LAYERS,)

    def pools(self) -> list[tuple[Component, ...]]:
        """Of each rank: keys and values, recurrent states, and metadata on the ranks of the last stage."""
        found: list[tuple[Component, ...]] = []
        for stage, count in enumerate(self.stages):
            first = sum(self.stages[:stage])
            layers = tuple(range(first, first + count))
            for rank in range(self.tp):
                share = (rank, self.tp)
                pools = Kv(layers=layers, pages=40, page=8, tp=share), Mamba(layers=layers, tp=share)
                found.append((*pools, Aux()) if first + count == LAYERS else pools)
        return found


TOPOLOGIES = {
    "TP 2 to 1": (Shape(2), Shape(1)),
    "TP 1 to 2": (Shape(1), Shape(2)),
    "TP 4 to 2": (Shape(4), Shape(2)),
    "PP 3 to 1, uneven": (Shape(1, (1, 3, 2)), Shape(1)),
}
KIT = ("TP 2 to 1", "TP 1 to 2")
"""What the conformance kit has over every backend, state type by state type."""


def test_every_decode_rank_gets_its_slice(two_engines: TwoEngines) -> None:
    names = [name for name in TOPOLOGIES if two_engines.backend == "tcp" or name not in KIT]
    sides = [[shape.pools() for shape in TOPOLOGIES[name]] for name in names]
    engines = [two_engines.prefill], [two_engines.decode]
    for role, started in enumerate(engines):
        started += two_engines.start(max(len(side[role]) for side in sides) - 1)
    for name, (prefill, decode) in zip(names, sides, strict=True):
        fleet = Fleet(two_engines, prefill, decode, engines)
        for _ in range(2):
            sent = fleet.run(TOKENS, cuts=(CUT,))
            assert all(sum(moved.nbytes for moved in each.report.moved.values()) > 0 for each in sent), name
