"""SGLang's types of state: the tests move each of them between two real pools, or this file says why not."""

from __future__ import annotations

import pytest
from support.deepseek_v4 import make_v4, switched
from support.newest import OLDER, WHY
from support.pools import KINDS, make

from statelink_sglang.backend import TESTED_STATE

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("sglang_context")]

NOT_MOVED = {
    "swa_ring": "only ROCm's pool of DeepSeek V4 has it, which is refused: SGLang's own indices do not fit that pool",
}
"""Why no test moves a type of state. The adapter refuses each of them."""


def _of_pools() -> set[str]:
    """The types of the pools whose bytes test_transfer.py and test_deepseek_v4.py compare."""
    listed = [make(kind).kv_args for kind in KINDS]
    with switched("dspark") as variant:
        listed.append(make_v4(variant).kv_args)
    return {each.value for args in listed for each in args.state_types}


@pytest.mark.skipif(OLDER, reason=WHY)
def test_every_type_is_moved_or_has_a_reason() -> None:
    from sglang.srt.disaggregation.base.conn import StateType

    assert {each.value for each in StateType} == TESTED_STATE | NOT_MOVED.keys()
    assert not TESTED_STATE & NOT_MOVED.keys()


@pytest.mark.skipif(OLDER, reason=WHY)
def test_every_type_that_the_adapter_takes_is_moved() -> None:
    assert _of_pools() == TESTED_STATE
