"""What a thread that computes sees of a small batch: its submission does not let go of the interpreter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.helpers.peers import until
from tests.helpers.spinner import spinning

from .common import MODES, batch_of, grant_all, join, u64
from .node import Node

if TYPE_CHECKING:
    from statelink.backend import Transfer

    from .remote import Remote

BATCHES, SIZE = 50, 4096


@pytest.mark.parametrize("mode", MODES)
def test_a_small_batch_is_submitted_in_one_go(target: Remote, mode: str) -> None:
    source = Node(np.full(SIZE, 7, np.uint8))
    join(source, target, mode)
    grant_all(target)
    columns = {"source": u64(source.address), "target": u64(target.address), "nbytes": u64(SIZE)}
    batch = batch_of(source, **columns)
    made: list[Transfer] = []

    def submit() -> None:
        made.append(source.backends["source"].submit("target", batch))

    submit()
    until(lambda: made[0].outcome is not None, 20)  # it is connected
    with spinning() as spinner:
        lost = spinner.lost(BATCHES, submit)
    until(lambda: all(each.outcome is not None for each in made), 20)
    source.close_all()
    assert all(each.outcome is not None and each.outcome.ok for each in made)
    assert (target.memory[:SIZE] == 7).all()
    assert lost == 0
