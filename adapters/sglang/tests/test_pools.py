"""SGLang's real pools: what is described of them, and that a difference from SGLang's own list is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.pools import make

from statelink.errors import StateError
from statelink_sglang.backend import describe_pools

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("sglang_context")]


@pytest.mark.parametrize(
    ("kind", "names", "states"),
    [
        ("mha", ["kv", "aux"], ()),
        ("mxfp8", ["kv", "block_scale", "aux"], ("block_scale",)),
        ("mla", ["kv", "aux"], ()),
        ("swa", ["kv", "swa", "aux"], ("swa",)),
        (
            "swa_mxfp8",
            ["kv", "block_scale", "swa", "block_scale_swa", "aux"],
            ("swa", "block_scale", "block_scale_swa"),
        ),
        ("hybrid", ["kv", "mamba", "aux"], ("mamba",)),
        ("qsa", ["kv", "mamba", "qsa_pending", "qsa_compressed", "aux"], ("mamba", "qsa_pending", "qsa_compressed")),
        ("dsa", ["kv", "dsa", "aux"], ("dsa",)),
        ("pooled", ["kv", "mamba", "dsa", "dsa_tail", "aux"], ("mamba", "dsa", "dsa_tail")),
        ("minimax", ["kv", "minimax_index_k", "minimax_dense_kv", "aux"], ("minimax_index_k", "minimax_dense_kv")),
    ],
)
def test_each_pool_is_described_as_sglang_lists_it(kind: str, names: list[str], states: tuple[str, ...]) -> None:
    made = make(kind)
    components, lists = describe_pools(made.pools, made.kv_args)
    assert [each.component.name for each in components] == names
    assert (lists.pages, lists.states) == (("kv",), tuple((name,) for name in states))
    assert lists.whole == {name for name in states if name not in ("mamba", "qsa_pending")}


def test_metadata_rows_have_the_names_of_sglangs_tensors() -> None:
    made = make("mha")
    components, _ = describe_pools(made.pools, made.kv_args)
    (aux,) = (each.component for each in components if each.component.name == "aux")
    names = [buffer.name for buffer in aux.buffers]
    assert names[0] == "output_ids"
    assert names[-1] == "bootstrap_room"


def _without_a_layer(args: Any) -> None:
    for values in (args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens):
        del values[-1]


def _with_another_buffer(args: Any) -> None:
    for values, more in ((args.kv_data_ptrs, 4096), (args.kv_data_lens, 64), (args.kv_item_lens, 32)):
        values.append(more)


def _with_other_items(args: Any) -> None:
    args.kv_item_lens[0] *= 2


def _with_a_new_type(args: Any) -> None:
    args.state_types.append(SimpleNamespace(value="fresh_state"))
    for values, more in ((args.state_data_ptrs, [4096]), (args.state_data_lens, [64]), (args.state_item_lens, [32])):
        values.append(more)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without_a_layer, r"only the pools describe 1 buffers of 'kv'"),
        (_with_another_buffer, r"only SGLang lists 1 buffers of 'kv': 64 bytes at 0x1000 in items of 32"),
        (_with_other_items, r"only SGLang lists 1 buffers of 'kv'"),
        (_with_a_new_type, r"SGLang moves the state type 'fresh_state', which the pools do not describe"),
    ],
)
def test_a_difference_from_sglangs_list_is_refused(change: Any, said: str) -> None:
    made = make("mha")
    change(made.kv_args)
    with pytest.raises(StateError, match=said):
        describe_pools(made.pools, made.kv_args)


def test_scales_that_sglang_does_not_list_are_refused() -> None:
    made = make("mla_fp4")
    with pytest.raises(StateError, match="the pool has scales in 'kv_scale_buffer', which SGLang does not list"):
        describe_pools(made.pools, made.kv_args)


def test_state_that_sglang_does_not_move_is_refused() -> None:
    made = make("swa")
    for name in ("types", "data_ptrs", "data_lens", "item_lens"):
        getattr(made.kv_args, f"state_{name}").clear()
    with pytest.raises(StateError, match="the pools describe swa, which SGLang does not move"):
        describe_pools(made.pools, made.kv_args)
