"""The planner against an oracle that knows nothing of it: see `carry` for what is compared with what."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings

from .carry import carry
from .strategies import KINDS, PROFILE, TOPOLOGIES, at_scale, cases

if TYPE_CHECKING:
    from .case import Case

EXAMPLES = 10
"""Cases per topology and kind of state."""


@at_scale
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_decode_rank_holds_its_slice_of_the_global_state(topology: str, kind: str, scale: int) -> None:
    examples = scale * EXAMPLES
    counted: Counter[str] = Counter()

    @settings(PROFILE, max_examples=examples)
    @given(cases(topology, kind))
    def check(case: Case) -> None:
        carried = carry(case)
        counted["cases"] += kind in case.kinds
        counted["moved"] += bool(carried.nbytes[kind])

    check()
    assert counted["cases"] >= examples
    assert counted["moved"] >= examples // 3, "too many of the cases have nothing to move"
