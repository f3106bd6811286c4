"""All ranks of decode give the memory of a failed request back in the same round. SGLang's queue, two real ranks."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING

import pytest
from support.deferred import run_rank

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.smoke

SECONDS = 120.0


def test_memory_is_given_back_when_it_is_quiet_on_every_rank(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    ranks = [context.Process(target=run_rank, args=(rank, str(tmp_path / "meeting"), said)) for rank in range(2)]
    try:
        for each in ranks:
            each.start()
        (_, *first), (_, *second) = sorted(said.get(timeout=SECONDS) for _ in ranks)
    finally:
        for each in ranks:
            each.join(10)
            each.kill()
    hooked, alone = zip(first, second, strict=True)
    assert hooked == ([[2], [1, 3], [4]], [[2], [1, 3], [4]])
    assert alone == ([[1, 2], [3], [4]], [[2, 3], [1], [4]]), "what the hook is for"
