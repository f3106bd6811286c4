"""Constructors in the words of the field: the right share, or a refusal that names the buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from statelink import state
from statelink.errors import StateError
from statelink.state import Described, Memory, Slab

from .look import elements


def zeros(*shape: int, dtype: str = "uint8") -> np.ndarray[Any, Any]:
    return np.zeros(shape, dtype)


def pair(*shape: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return zeros(*shape), zeros(*shape)


def names(made: Described) -> list[str]:
    return [buffer.name for buffer in made.component.buffers]


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
    window = state.window_pages({1: pair(5, 8, 2, 3)}, heads=4, window=100, tp=(1, 2))
    assert (window.component.type, window.component.page, window.component.window) == ("swa", 8, 100)


def test_convolutions_are_cut_group_by_group() -> None:
    made = state.mamba_slots(
        conv={4: zeros(3, 8, 2)}, ssm={4: zeros(3, 2, 5, 7)}, conv_groups=(4, 4, 8), heads=4, tp=(1, 2)
    )
    conv, ssm = made.component.buffers
    assert names(made) == ["layers.4.conv", "layers.4.ssm"]
    assert conv.layout.shape == (16, 2)
    # A rank's blocks stand one after the other: [key/2 | key/2 | value/2].
    assert conv.layout.slabs == (
        Slab((2, 0), (4, 2), 0, (2, 1)),
        Slab((6, 0), (8, 2), 4, (2, 1)),
        Slab((12, 0), (16, 2), 8, (2, 1)),
    )
    assert ssm.layout.shape == (4, 5, 7)
    assert ssm.layout.slabs == (Slab((2, 0, 0), (4, 5, 7), 0, (35, 7, 1)),)
    assert made.component.page == 0


def test_transposed_convolutions_have_channels_last() -> None:
    made = state.mamba_slots(conv={0: zeros(3, 2, 8)}, ssm={}, conv_groups=(4, 4, 8), tp=(0, 2), transposed=True)
    (conv,) = made.component.buffers
    assert conv.layout.shape == (16, 2)
    assert conv.layout.slabs == (
        Slab((0, 0), (2, 2), 0, (1, 8)),
        Slab((4, 0), (6, 2), 2, (1, 8)),
        Slab((8, 0), (12, 2), 4, (1, 8)),
    )


def test_several_convolutions_of_a_layer_have_names_of_their_own() -> None:
    made = state.mamba_slots(conv={2: [zeros(3, 4, 2), zeros(3, 4, 3)]}, ssm={}, tp=(1, 3))
    assert names(made) == ["layers.2.conv.0", "layers.2.conv.1"]
    assert [buffer.layout.slabs[0].start for buffer in made.component.buffers] == [(4, 0), (4, 0)]
    assert made.component.buffers[0].layout.shape == (12, 2)


def test_metadata_rows() -> None:
    made = state.aux_rows(
        {"tokens": zeros(6, 16, dtype="int32"), "hidden": zeros(6, 2, 8, dtype="float16")}, name="meta"
    )
    assert names(made) == ["tokens", "hidden"]
    assert (made.component.name, made.component.type) == ("meta", "aux")
    assert [buffer.layout.dtype for buffer in made.component.buffers] == ["int32", "float16"]
    assert made.component.buffers[1].layout.held == 32


def test_flags_reach_the_description() -> None:
    made = state.kv_pages({0: pair(2, 4, 2, 3)}, heads=2, name="draft", optional=True, format="nvfp4")
    assert made.component.name == "draft"
    assert made.component.format == "nvfp4"
    assert all(buffer.optional for buffer in made.component.buffers)
    assert not any(buffer.optional for buffer in state.kv_pages({0: pair(2, 4, 2, 3)}, heads=2).component.buffers)


def test_what_is_described_is_what_the_array_holds() -> None:
    rng = np.random.default_rng(5)
    keys = rng.integers(0, 1 << 16, (3, 2, 4, 5), np.uint16)
    conv = rng.integers(0, 1 << 16, (4, 2, 6), np.uint16)
    inventory = state.describe(
        "rank",
        [
            state.kv_pages({0: (keys, keys.copy())}, heads=8, tp=(1, 4), order="hnd"),
            state.mamba_slots(conv={1: conv}, ssm={}, conv_groups=(6, 12), tp=(2, 3), transposed=True),
        ],
    )
    found = elements(inventory, "kv", "layers.0.k")
    assert found == {
        (page, token, 2 + head, dim): keys[page, head, token, dim].tobytes()
        for page, head, token, dim in np.ndindex(*keys.shape)
    }
    # Third rank of three: channels 4, 5 of the first group and 8..12 of the second, which begins at 6.
    local = [4, 5, 14, 15, 16, 17]
    assert elements(inventory, "mamba", "layers.1.conv") == {
        (slot, local[channel], tap): conv[slot, tap, channel].tobytes()
        for slot, tap, channel in np.ndindex(*conv.shape)
    }


REFUSED: list[tuple[Callable[[], object], str]] = [
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
        lambda: state.window_pages({7: pair(5, 4, 2, 6)}, heads=2, window=0),
        "component 'swa' of type 'swa' has window 0",
    ),
    (
        lambda: state.mamba_slots(conv={7: zeros(3, 8, 2)}, ssm={}, conv_groups=(4, 4, 8)),
        "buffer 'layers.7.conv' of component 'mamba' does not hold the share it should: "
        "an item of the array is channel 8, kernel 2; this rank's share is channel 16, kernel 2",
    ),
    (
        lambda: state.mamba_slots(conv={7: zeros(3, 8, 2)}, ssm={}, conv_groups=(4, 6, 6), tp=(0, 4)),
        "6 channels of 'layers.7.conv' cannot be shared by 4 ranks: the width is not divisible",
    ),
    # More ranks than channels: a group is never replicated by accident.
    (
        lambda: state.mamba_slots(conv={7: zeros(3, 3, 2)}, ssm={}, conv_groups=(1, 1, 2), tp=(0, 2)),
        "1 channels of 'layers.7.conv' cannot be shared by 2 ranks: the width is not divisible",
    ),
    (lambda: state.mamba_slots(conv={7: zeros(3, 8)}, ssm={}), "array 'layers.7.conv' needs the axes [slots, channels"),
    (
        lambda: state.mamba_slots(conv={}, ssm={7: zeros(3, 8, 2)}),
        "recurrent state 'layers.7.ssm' needs [slots, heads, ...] and the number of heads",
    ),
    (
        lambda: state.mamba_slots(conv={}, ssm={7: zeros(3, 8, 2)}, heads=8, tp=(0, 2)),
        "buffer 'layers.7.ssm' of component 'mamba' does not hold the share it should",
    ),
    (
        lambda: state.aux_rows({"row": zeros(8, 5).T}),
        "buffer 'row' of component 'aux' is a transposed array: its strides are (1, 5) bytes",
    ),
    (
        lambda: state.ring_rows({7: {"a": zeros(8, 3, 2).swapaxes(0, 1)}}, type="dsa_tail", group=4),
        "the rings of array 'layers.7.a' do not follow one another in memory: 2 bytes from slot to slot, 8 rows of 6 "
        "bytes; the array is transposed",
    ),
    # What is wrong with an item's boxes names the buffer.
    (
        lambda: state.aux_rows({"row": np.broadcast_to(zeros(5, 1), (5, 4))}),
        "buffer 'row' of component 'aux': the elements of a slab overlap in memory: strides (0,)",
    ),
    (
        lambda: state.mla_pages({0: zeros(5, 4, 6)}, partition=state.Partition("cyclic", 2, 0, 6)),
        "component 'kv' deals its positions out in blocks of 6: a page has 4 positions, and neither divides the other",
    ),
    (lambda: state.mamba_slots(conv={}, ssm={}), "component 'mamba' needs buffers"),
    (lambda: state.aux_rows({}), "component 'aux' needs buffers"),
    (lambda: state.aux_rows(zeros(5, 4)), "rows by name are given as ndarray: a dict is expected"),  # type: ignore[arg-type]
    (lambda: state.kv_pages([], heads=2), "arrays by layer are given as list: a dict is expected"),  # type: ignore[arg-type]
    (
        lambda: state.compressed_pages({7: zeros(5, 4, 6)}, page=8),  # type: ignore[dict-item]
        "the arrays of layer 7 by name are given as ndarray: a dict is expected",
    ),
    (
        lambda: state.mamba_slots(conv=zeros(3, 8, 2), ssm={}),  # type: ignore[arg-type]
        "convolution states by layer are given as ndarray: a dict is expected",
    ),
    (lambda: state.aux_rows({"room": zeros(5)}), "array 'room' needs items first and at least one more axis"),
    (lambda: state.kv_pages({}, heads=2), "component 'kv' needs at least one array"),
    (
        lambda: state.kv_pages({7: (zeros(5, 4, 2, 6),)}, heads=2),  # type: ignore[dict-item]
        "layer 7 needs one array of keys and one of values, and a scale of each if there are any: 1 arrays, 0 scales",
    ),
    (
        lambda: state.kv_pages({7: pair(5, 4, 2, 6)}, heads=2, scales={7: (1.0,)}),  # type: ignore[dict-item]
        "layer 7 needs one array of keys and one of values, and a scale of each if there are any: 2 arrays, 1 scales",
    ),
    (
        lambda: state.kv_pages({7: pair(5, 4, 2, 6)}, heads=2.0),  # type: ignore[arg-type]
        "the number of heads of 'layers.7.k' is 2.0: a whole number is expected",
    ),
    (
        lambda: state.kv_pages({7: pair(5, 4, 2, 6)}, heads=2, tp=2),  # type: ignore[arg-type]
        "the rank and width of 'layers.7.k' is 2: a pair of whole numbers is expected",
    ),
    (
        lambda: state.kv_pages({"7": pair(5, 4, 2, 6)}, heads=2),  # type: ignore[dict-item]
        "the layer of buffer 'layers.7.k' is '7': a whole number is expected",
    ),
    (
        lambda: state.window_pages({7: pair(5, 4, 2, 6)}, heads=2, window=128.0),  # type: ignore[arg-type]
        "the window of component 'swa' is 128.0: a whole number is expected",
    ),
    (
        lambda: state.compressed_pages({7: {"kv": zeros(5, 4, 6)}}, page=8.0),  # type: ignore[arg-type]
        "the page of component 'dsv4' is 8.0: a whole number is expected",
    ),
    (
        lambda: state.Partition("cyclic", 2, "1"),  # type: ignore[arg-type]
        "the index of a partition is '1': a whole number is expected",
    ),
]


def test_numbers_of_other_libraries_are_pythons_in_the_description() -> None:
    """What engines take from configurations and tensors goes over the wire like any other number."""
    made = []
    for whole, real in ((int, float), (np.int64, np.float64), (torch.tensor, torch.tensor)):
        convert: Any = whole
        scales: Any = {7: (real(0.5), real(2.0))}
        parts = [
            state.kv_pages(
                {7: (pointer(1, convert(5), 4, 2, 6), pointer(2, 5, 4, 2, 6))},
                heads=convert(8),
                tp=(convert(1), convert(4)),
                scales=scales,
                partition=state.Partition("cyclic", convert(2), convert(1), convert(4)),
            ),
            state.window_pages({1: (pointer(3, 5, 4, 2, 6), pointer(4, 5, 4, 2, 6))}, heads=2, window=convert(9)),
            state.mamba_slots(conv={1: pointer(5, 3, 8, 2)}, ssm={}, conv_groups=[convert(4), convert(4)]),
            state.ring_rows({1: {"a": pointer(6, 3, 8, 2)}}, type="dsa_tail", group=convert(4), replicated=True),
        ]
        given: Any = {"rank": convert(1), "ranks": convert(2), "axes": {"tp": (convert(1), convert(4))}}
        made.append(state.describe("rank", parts, **given))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(made[-1]), type=state.Inventory) == made[0]
    assert len({each.digest() for each in made}) == 1


def pointer(number: int, *shape: int) -> Memory:
    return Memory.pointer(number << 20, shape, "uint8", 1)


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
