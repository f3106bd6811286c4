"""When decode lets a request begin to be received, by vLLM's own cache manager."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import pytest
from support.simulated_pair import pair_of
from vllm.config import VllmConfig

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("quiet")]

KINDS = ("window", "full")


def least(configuration: Path, drafts: int) -> int:
    """The fewest free blocks with which a second prompt of 16 tokens begins, in blocks of 4."""
    with mock.patch.object(VllmConfig, "num_speculative_tokens", drafts):
        pair = pair_of(configuration, KINDS, blocks=(4, 4), spare=(9, 40), at_once=True)
    one, other = (pair.engines[1].scheduler.requests[pair.request(stream, 16)] for stream in (0, 1))
    connector, manager = pair.engines[1].connector, pair.engines[1].scheduler.kv_cache_manager
    count, beside = connector.get_num_new_matched_tokens(one, 0)
    assert (count, beside) == (15, True)
    blocks = manager.allocate_slots(one, 0, num_external_computed_tokens=count, delay_cache_blocks=True)
    connector.update_state_after_alloc(one, blocks, count)
    one.num_computed_tokens = count
    while connector.get_num_new_matched_tokens(other, 0) == (15, True):
        manager.block_pool.get_new_blocks(1)
    assert connector.get_num_new_matched_tokens(other, 0) == (None, False)
    return int(manager.block_pool.get_num_free_blocks()) + 1


def test_drafts_need_blocks_behind_the_prompts_that_are_received(configuration: Path) -> None:
    """Each request then needs one block more in each group: its 16 tokens fill theirs."""
    assert least(configuration, drafts=1) == least(configuration, drafts=0) + 2 * len(KINDS)
