"""Which requests may begin to be received, by vLLM's own cache manager."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.simulated_pair import pair_of

from statelink_vllm._admission import Admission, blocks_needed

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("quiet")]


def test_drafts_need_blocks_behind_the_prompt(configuration: Path) -> None:
    """Two requests of 16 tokens, in blocks of 4, and a pool that has just the blocks for them."""
    target = pair_of(configuration, ("window", "full"), blocks=(4, 4), spare=(9, 40)).engines[1]
    manager = target.scheduler.kv_cache_manager
    for name in ("one", "other"):
        target.add(name, list(range(16)), 4, None)
    one, other = (target.scheduler.requests[name] for name in ("one", "other"))
    needed = blocks_needed(manager, one)
    assert needed == blocks_needed(manager, other) == 2 * 16 // 4
    manager.block_pool.get_new_blocks(manager.block_pool.get_num_free_blocks() - 2 * needed)
    for beyond, fits in ((0, True), (1, False)):
        admission = Admission(beyond)
        admission.bind(manager)
        admission.begin(one)
        assert admission.fits(other, 0, 0) is fits
        admission.next_step()
        assert admission.fits(other, 0, 0) is fits
        admission.end("one")
        assert admission.fits(other, 0, 0)
