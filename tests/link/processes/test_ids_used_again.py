"""A room id is used again after an abort, while the other side still is at an earlier use, or already at a later one.

No use may succeed with the bytes of another, and none on one side alone. Every use has a tag that fills its pages; the
test fills them and looks at them itself.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from tests.helpers.pools import Kv
from tests.quiescence.uses import Ground, Tally, play

if TYPE_CHECKING:
    from tests.link.conftest import Workshop

SHORT, LONG = 60, 3000
"""Ids of a run; each has two or three uses."""
POOLS = (Kv(layers=(0, 1), pages=64, heads=2),)
TELLING = pytest.mark.parametrize("attempts", [True, False], ids=["with attempts", "without attempts"])


def used_again(workshop: Workshop, ids: int, attempts: bool) -> Tally:
    seed = int(os.environ.get("STATELINK_SEED") or secrets.randbits(32))
    pair = workshop.pair(POOLS, POOLS, deadline=30.0)
    tally = play(Ground(pair.prefill, pair.decode), ids, seed, attempts=attempts)
    what = f"ids used again over {workshop.backend}, {'with' if attempts else 'without'} attempts"
    print(f"{what}, seed {seed}: {tally}")
    assert (tally.wrong, tally.foreign) == (0, 0), (tally.found, tally)
    assert tally.aborted > ids, tally
    assert set(tally.reasons) <= {"room.aborted", "room.reused"}, tally
    assert tally.succeeded > (0.9 if attempts else 0.02) * ids, tally
    assert not (attempts and (tally.unserved or tally.orphans)), tally
    for link in (pair.prefill, pair.decode):
        seen = link.snapshot()
        assert seen["quarantined"] == []
        assert not any(seen["rooms"].values()), seen
    return tally


@TELLING
@pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")
def test_no_use_of_an_id_gets_the_bytes_of_another(workshop: Workshop, attempts: bool) -> None:
    used_again(workshop, SHORT, attempts)


@pytest.mark.soak
@TELLING
def test_no_use_of_thousands_of_ids_gets_the_bytes_of_another(
    workshop: Workshop, attempts: bool, tell: Callable[[str], None]
) -> None:
    tally = used_again(workshop, LONG, attempts)
    tell(f"ids used again over {workshop.backend}, {'with' if attempts else 'without'} attempts: {tally}")
