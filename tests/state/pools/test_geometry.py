"""The numbers that pools do not know: refused where they contradict themselves or the pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from statelink import state
from statelink.errors import StateError
from statelink.state import PoolGeometry

from .fakes import (
    keys_pool,
    latents_pool,
)
from .reading import geometry, refused


def test_numbers_on_which_pool_and_geometry_differ() -> None:
    for wrong in ("4", 4.0):
        odd = SimpleNamespace(page_size=wrong, get_contiguous_buf_infos=lambda: ([16], [64], [16]))
        refused(f"page_size is {wrong!r}: a whole number", odd, geometry(1))
    refused(
        "KeysPool.head_num: it is 2; rank 0 of 2 holds 1 of the 2", keys_pool(1), geometry(1, kv_heads=2, tp=(0, 2))
    )
    refused("KeysPool.page_size: it is 4; the geometry says 8", keys_pool(1), geometry(1, kv_heads=2, page_size=8))
    refused("KeysPool.start_layer: it is 0; .* it is 1", keys_pool(1), geometry(2, kv_heads=2, stage=(1, 2)))
    unknown = SimpleNamespace(get_contiguous_buf_infos=lambda: ([16], [64], [16]))
    refused("nobody says how many tokens a page", unknown, geometry(1))
    refused("lists 2 buffers; latent of 1 layers would be 1", keys_pool(1), geometry(1))
    refused("lists 4 buffers; k of 3 layers, then v of 3 layers would be 6", keys_pool(2), geometry(3, kv_heads=2))


@pytest.mark.parametrize(
    "wrong",
    [
        {"stage": (1, 3)},
        {"kinds": ["full"]},
        {"kinds": ["full", "half"]},
        {"tp": (2, 2)},
        {"state_tp": (-1, 2)},
        {"order": "hdn"},
        {"window": -1},
        {"request_ratio": 0},
        {"envelope": {"kv": [(0, 1)]}},
        {"envelope": {"kw": [(0, 1)]}, "unified": True},
        {"groups": {"nsa": [("index_k", None)]}},
        {"tp": 2},
        {"stage": (0, 1, 2)},
        {"state_tp": (0, 2.0)},
    ],
)
def test_geometry_that_contradicts_itself(wrong: Any) -> None:
    with pytest.raises(StateError):
        geometry(2, **wrong)


def test_an_element_type_that_nobody_knows() -> None:
    for dtype in ("int4", "object", "U", torch.bfloat16):
        given = PoolGeometry(layers=1, dtype=dtype)  # type: ignore[arg-type]
        with pytest.raises(StateError, match=f"no element type {dtype!r}"):
            state.from_pools(latents_pool(1), geometry=given)
    (found,) = state.from_pools(latents_pool(1), geometry=PoolGeometry(layers=1, dtype="float8_e4m3fn"))
    assert found.component.buffers[0].layout.itemsize == 1
