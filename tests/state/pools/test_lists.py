"""Lists that contradict themselves, cannot be had, or that nobody reads: refused by class, method and reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from statelink import state

from .fakes import (
    HybridPool,
    keys_pool,
    listing,
    noise,
    some_states,
    triples,
)
from .reading import geometry, refused


@pytest.mark.parametrize(
    ("lists", "cause"),
    [
        (([16], [64, 64], [16]), "unequal length: 1 addresses, 2 lengths, 1 item sizes"),
        (([0], [64], [16]), "entry 0 has 64 bytes at 0x0"),
        (([16], [64], [0]), "entry 0 has 64 bytes at 0x10 in items of 0"),
        (([16], [64], [128]), "in items of 128"),
        (([16], [-64], [16]), "entry 0 has -64 bytes"),
        (([16], [64], [18]), "no whole 4 rows of bfloat16"),
        (([(1 << 64) + 16], [64], [16]), "entry 0 has 64 bytes at 0x10000000000000010"),
        (([16, 256], [64, 64], [16, 16]), "lists 2 buffers; latent of 1 layers would be 1"),
    ],
)
def test_lists_that_contradict_themselves(lists: Any, cause: str) -> None:
    refused(rf"cannot describe SimpleNamespace.get_contiguous_buf_infos: .*{cause}", listing(*lists), geometry(1))


def test_a_list_that_is_no_triple() -> None:
    for value in (None, 3, ([1], [2]), (["a"], [1], [1])):
        pool = SimpleNamespace(page_size=4, get_contiguous_buf_infos=lambda value=value: value)
        refused("addresses, lengths and item sizes are expected", pool, geometry(1))


def test_a_list_that_cannot_be_had() -> None:
    def broken() -> Any:
        raise RuntimeError("freed")

    def abstract() -> Any:
        raise NotImplementedError

    pool = listing([16], [64], [16])
    pool.get_state_buf_infos = pool.get_kv_scale_buf_infos = abstract
    assert [each.component.name for each in state.from_pools(pool, geometry=geometry(1))] == ["kv"]
    pool.get_state_buf_infos = broken
    refused("SimpleNamespace.get_state_buf_infos: it raised RuntimeError: freed", pool, geometry(1))
    pool.get_contiguous_buf_infos = abstract
    refused("SimpleNamespace.get_contiguous_buf_infos: it raised NotImplementedError", pool, geometry(1))


def test_lists_that_nobody_reads() -> None:
    pool = keys_pool(1)
    given = geometry(1, kv_heads=2)
    extra = noise(3, 8)
    for name in ("get_state_buf_infos", "get_qsa_pending_state_buf_infos", "get_strange_buf_infos"):
        setattr(pool, name, lambda: triples([extra]))
        refused(rf"KeysPool.{name}: it lists buffers that a pool of this kind is not known to have", pool, given)
        # The same bytes once more, or nothing, is no loss.
        for harmless in (lambda: triples(pool.k), lambda: ([], [], [])):
            setattr(pool, name, harmless)
            assert len(state.from_pools(pool, geometry=given)) == 1
        delattr(pool, name)
    hybrid = HybridPool(keys_pool(1), [1, 1], some_states([0]))
    hybrid.full_kv_pool.scales = [extra, extra]
    refused("KeysPool.get_kv_scale_buf_infos", hybrid, geometry(2, kv_heads=2))
