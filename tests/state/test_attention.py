"""Pages of keys, latents, windows and index keys: the right share, or a refusal that names the buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from statelink import state
from statelink.errors import StateError
from statelink.state import Slab

from .look import names, pair, zeros


@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["numpy", "torch"])
@pytest.mark.parametrize("order", ["nhd", "hnd"])
def test_pages_of_keys_and_values(make: Callable[..., Any], order: str) -> None:
    shape = (7, 4, 2, 6) if order == "nhd" else (7, 2, 4, 6)
    wide = (*shape[:3], 8)
    made = state.kv_pages({3: (make(shape), make(wide)), 9: (make(shape), make(wide))}, heads=8, tp=(3, 4), order=order)
    component = made.component
    assert (component.name, component.type, component.page, component.window) == ("kv", "kv", 4, None)
    assert names(made) == ["layers.3.k", "layers.3.v", "layers.9.k", "layers.9.v"]
    assert [buffer.layer for buffer in component.buffers] == [3, 3, 9, 9]
    k, v = (buffer.layout for buffer in component.buffers[:2])
    size = k.itemsize
    assert (k.shape, v.shape) == ((4, 8, 6), (4, 8, 8))
    assert k.axes == ("token", "head", "dim")
    assert k.position == 0
    token, head = (12, 6) if order == "nhd" else (6, 24)
    assert k.slabs == (Slab((0, 6, 0), (4, 8, 6), 0, (token * size, head * size, size)),)
    assert [buffer.count for buffer in component.buffers] == [7] * 4
    assert component.buffers[0].stride == 48 * size
    assert component.buffers[2].layout is k


@pytest.mark.parametrize(
    ("heads", "width", "shares"),
    [
        (8, 2, [(0, 4), (4, 8)]),
        (6, 3, [(0, 2), (2, 4), (4, 6)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 3, [(0, 1)] * 3),
        (4, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
    ],
)
def test_heads_are_shared_out_and_replicated_among_neighbours(
    heads: int, width: int, shares: list[tuple[int, int]]
) -> None:
    for rank, (first, last) in enumerate(shares):
        made = state.kv_pages({0: pair(2, 4, last - first, 3)}, heads=heads, tp=(rank, width))
        (slab,) = made.component.buffers[0].layout.slabs
        assert (slab.start[1], slab.stop[1]) == (first, last)


def test_latents_index_keys_and_windows() -> None:
    latent = state.mla_pages({1: zeros(5, 4, 9)}, name="latent")
    assert names(latent) == ["layers.1.latent"]
    assert latent.component.type == "kv"
    assert latent.component.buffers[0].layout.slabs == (Slab((0, 0), (4, 9), 0, (9, 1)),)
    index = state.index_pages({1: zeros(5, 4, 9), 2: zeros(0, 4, 9)})
    assert (index.component.name, index.component.type) == ("dsa", "dsa")
    assert [buffer.count for buffer in index.component.buffers] == [5, 0]
    window = state.kv_pages({1: pair(5, 8, 2, 3)}, heads=4, window=100, tp=(1, 2))
    assert (window.component.type, window.component.page, window.component.window) == ("swa", 8, 100)
    chunks = state.kv_pages({1: pair(5, 8, 2, 3)}, heads=4, attention_chunk=64, tp=(1, 2)).component
    assert (chunks.type, chunks.page, chunks.window, chunks.group) == ("chunked_local", 8, None, 64)
    assert chunks.buffers == window.component.buffers


def test_one_array_of_keys_and_values_is_a_pair() -> None:
    """Some engines have the keys and the values of all pages in one array, the keys first."""
    both = zeros(2, 5, 4, 2, 6)
    one, two = (state.kv_pages({0: given}, heads=2) for given in (both, (both[0], both[1])))  # type: ignore[dict-item]
    assert one == two


def test_flags_reach_the_description() -> None:
    made = state.kv_pages({0: pair(2, 4, 2, 3)}, heads=2, name="draft", optional=True, format="nvfp4")
    assert made.component.name == "draft"
    assert made.component.format == "nvfp4"
    assert all(buffer.optional for buffer in made.component.buffers)
    assert not any(buffer.optional for buffer in state.kv_pages({0: pair(2, 4, 2, 3)}, heads=2).component.buffers)


FUSED = "hint: fused_pages describes one array that has the keys and the values of a token side by side"

REFUSED: list[tuple[Callable[[], object], str]] = [
    # The numbers of a rank, where those of the whole model are meant.
    (
        lambda: state.kv_pages({7: pair(5, 4, 2, 6)}, heads=2, tp=(0, 2)),
        "buffer 'layers.7.k' of component 'kv' does not hold the share it should: "
        "an item of the array is token 4, head 2, dim 6; this rank's share is token 4, head 1, dim 6\n"
        "hint: the array has as many on axis 'head' as the whole model is said to have: 'heads', 'conv_groups' and the "
        "like are the whole model's numbers, not this rank's",
    ),
    # One array with keys and values.
    (
        lambda: state.kv_pages({7: zeros(5, 2, 4, 12)}, heads=2),  # type: ignore[dict-item]
        f"layer 7 needs a pair (K, V) of arrays: one array of shape (5, 2, 4, 12) was passed\n{FUSED}",
    ),
    (
        lambda: state.kv_pages({7: state.Memory.of(zeros(2, 2, 4, 12))}, heads=2, window=8),  # type: ignore[dict-item]
        f"layer 7 needs a pair (K, V) of arrays: one array of shape (2, 2, 4, 12) was passed\n{FUSED}",
    ),
    (
        lambda: state.kv_pages({7: pair(5, 4, 3, 6)}, heads=8, tp=(0, 4)),
        "buffer 'layers.7.k' of component 'kv' does not hold the share it should: "
        "an item of the array is token 4, head 3, dim 6; this rank's share is token 4, head 2, dim 6",
    ),
    (
        lambda: state.kv_pages({7: (zeros(5, 4, 2, 6), zeros(5, 4, 4, 6))}, heads=8, tp=(0, 4)),
        "buffer 'layers.7.v' of component 'kv' does not hold the share it should",
    ),
    (
        lambda: state.kv_pages({7: pair(5, 2, 4, 6)}, heads=2, order="nhd", name="target"),
        "buffer 'layers.7.k' of component 'target' does not hold the share it should: "
        "an item of the array is token 2, head 4, dim 6; this rank's share is token 2, head 2, dim 6",
    ),
    (
        lambda: state.kv_pages({7: pair(5, 4, 2, 6)}, heads=6, tp=(0, 4)),
        "6 heads of 'layers.7.k' cannot be shared by 4 ranks: one does not divide the other",
    ),
    (lambda: state.kv_pages({7: pair(5, 4, 2, 6)}, heads=2, tp=(4, 4)), "rank 4 of 4 cannot hold a share of 2 heads"),
    (lambda: state.kv_pages({7: pair(5, 4, 2, 6)}, heads=2, tp=(-1, 4)), "rank -1 of 4 cannot hold a share"),
    (lambda: state.kv_pages({7: pair(5, 4, 2, 6)}, heads=0), "rank 0 of 1 cannot hold a share of 0 heads"),
    (lambda: state.kv_pages({7: pair(5, 4, 2, 6)}, heads=2, order="dhn"), "no page order 'dhn'\nhint: 'nhd'"),
    (
        lambda: state.kv_pages({7: pair(5, 4, 6)}, heads=2),
        "array 'layers.7.k' needs the axes [pages, tokens, heads, dim]: its shape is (5, 4, 6)",
    ),
    (
        lambda: state.kv_pages({7: pair(5, 4, 6)}, heads=2, order="hnd"),
        "array 'layers.7.k' needs the axes [pages, heads, tokens, dim]",
    ),
    (
        lambda: state.kv_pages({0: pair(5, 4, 2, 6), 1: pair(5, 8, 2, 6)}, heads=2),
        "the arrays of component 'kv' differ in tokens a page: they have 4, 8",
    ),
    (lambda: state.mla_pages({7: zeros(5, 4)}), "array 'layers.7.latent' needs the axes [pages, tokens, width]"),
    (
        lambda: state.index_pages({7: zeros(5, 4, 1, 6)}),
        "array 'layers.7.index_k' needs the axes [pages, tokens, width]",
    ),
    (
        lambda: state.kv_pages({7: pair(5, 4, 2, 6)}, heads=2, window=0),
        "component 'swa' of type 'swa' has window 0",
    ),
    (
        lambda: state.kv_pages({7: pair(5, 4, 2, 6)}, heads=2, attention_chunk=1),
        "component 'chunked_local' of type 'chunked_local' has groups of 1 and keeps 0: "
        "of groups of one position, none is ever open\n"
        "hint: a type with coverage 'open' needs the positions of a group, at least 2",
    ),
    (
        lambda: state.kv_pages({7: pair(5, 4, 2, 6)}, heads=2, attention_chunk=0),
        "component 'chunked_local' of type 'chunked_local' has groups of 0 and keeps 0\nhint",
    ),
    (
        lambda: state.kv_pages({7: pair(5, 4, 2, 6)}, heads=2, attention_chunk=64.0),  # type: ignore[arg-type]
        "'attention_chunk' of kv_pages is 64.0: a whole number is expected",
    ),
    (
        lambda: state.compressed_pages({7: {"kv": zeros(5, 4, 6)}}, page=4, type="chunked_local", window=4, group=8),
        "component 'dsv4' of type 'chunked_local' has window 4",
    ),
    (
        lambda: state.kv_pages({7: pair(5, 4, 2, 6)}, heads=2, type="chunked_local"),
        "component 'chunked_local' of type 'chunked_local' has groups of 1 and keeps 0",
    ),
    (
        lambda: state.mla_pages({0: zeros(5, 4, 6)}, partition=state.Partition("cyclic", 2, 0, 6)),
        "component 'kv' deals its positions out in blocks of 6: a page has 4 positions, and neither divides the other",
    ),
    (lambda: state.kv_pages([], heads=2), "'layers' of kv_pages is of type list: a dict is expected"),  # type: ignore[arg-type]
    (
        lambda: state.compressed_pages({7: zeros(5, 4, 6)}, page=8),  # type: ignore[dict-item]
        "entry 7 of 'layers' of compressed_pages is of type ndarray: a dict is expected",
    ),
    (lambda: state.kv_pages({}, heads=2), "component 'kv' needs at least one array"),
    (
        lambda: state.kv_pages({7: (zeros(5, 4, 2, 6),)}, heads=2),  # type: ignore[dict-item]
        "layer 7 needs one array of keys and one of values: 1 arrays were passed",
    ),
    (
        lambda: state.kv_pages({7: pair(5, 4, 2, 6)}, heads=2, scales={7: (1.0,)}),  # type: ignore[dict-item]
        "entry 7 of 'scales' of kv_pages is (1.0,): a tuple of 2 is expected",
    ),
    (
        lambda: state.kv_pages({7: pair(5, 4, 2, 6)}, heads=2.0),  # type: ignore[arg-type]
        "'heads' of kv_pages is 2.0: a whole number is expected",
    ),
    (
        lambda: state.kv_pages({7: pair(5, 4, 2, 6)}, heads=2, tp=2),  # type: ignore[arg-type]
        "'tp' of kv_pages is 2: a tuple of 2 is expected",
    ),
    (
        lambda: state.kv_pages({"7": pair(5, 4, 2, 6)}, heads=2),  # type: ignore[dict-item]
        "a key of 'layers' of kv_pages is '7': a whole number from 0 to 2147483647 is expected",
    ),
    (
        lambda: state.kv_pages({7: pair(5, 4, 2, 6)}, heads=2, window=128.0),  # type: ignore[arg-type]
        "'window' of kv_pages is 128.0: a whole number is expected",
    ),
    (
        lambda: state.compressed_pages({7: {"kv": zeros(5, 4, 6)}}, page=8.0),  # type: ignore[arg-type]
        "'page' of compressed_pages is 8.0: a whole number is expected",
    ),
    (
        lambda: state.Partition("cyclic", 2, "1"),  # type: ignore[arg-type]
        "the index of a partition is '1': a whole number is expected",
    ),
]


@pytest.mark.parametrize(("make", "text"), REFUSED, ids=[text[:50] for _, text in REFUSED])
def test_the_wrong_share_is_refused_by_name(make: Callable[[], object], text: str) -> None:
    with pytest.raises(StateError) as caught:
        make()
    assert str(caught.value).startswith(text)


def test_the_same_array_for_keys_and_values_is_refused() -> None:
    both = zeros(5, 4, 2, 6)
    with pytest.raises(
        StateError, match=r"buffers 'layers\.0\.k' and 'layers\.0\.v' of component 'kv' overlap in memory"
    ):
        state.describe("rank", [state.kv_pages({0: (both, both)}, heads=2)])


@pytest.mark.parametrize(
    ("make", "axes"),
    [
        (lambda: state.kv_pages({7: pair(5, 4, 8, 6)}, heads=4), ("token", 4, "head")),
        (lambda: state.kv_pages({7: pair(5, 8, 4, 6)}, heads=4, order="hnd"), ("token", 4, "head")),
        (
            lambda: state.mamba_slots(conv={7: zeros(3, 2, 16)}, ssm={}, conv_groups=(4, 4, 8)),
            ("kernel", 16, "channel"),
        ),
    ],
)
def test_an_array_whose_axes_are_in_another_order_is_called_transposed(
    make: Callable[[], object], axes: tuple[str, int, str]
) -> None:
    with pytest.raises(StateError) as caught:
        make()
    there, extent, wanted = axes
    assert f"the array looks transposed: its axis {there!r} has the {extent} of axis {wanted!r}" in str(caught.value)


def test_an_array_of_the_whole_model_is_not_called_transposed() -> None:
    """Even if another of its axes happens to have the extent of this rank's share."""
    with pytest.raises(StateError, match="as many on axis 'channel' as the whole model is said to have"):
        state.mamba_slots(conv={7: zeros(4, 8, 4)}, ssm={}, conv_groups=(8,), tp=(0, 2))
