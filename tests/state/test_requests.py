"""Slots, rows and rings of requests: the right share, or a refusal that names the buffer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from statelink import state
from statelink.errors import StateError
from statelink.state import Slab

from .look import names, zeros


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
    assert not any(buffer.optional for buffer in made.component.buffers)
    (row,) = state.aux_rows({"tokens": zeros(6, 16)}, optional=True).component.buffers
    assert row.optional


REFUSED: list[tuple[Callable[[], object], str]] = [
    (
        lambda: state.mamba_slots(conv={7: zeros(3, 8, 2)}, ssm={}, conv_groups=(4, 4, 8)),
        "buffer 'layers.7.conv' of component 'mamba' does not hold the share it should: "
        "an item of the array is channel 8, kernel 2; this rank's share is channel 16, kernel 2",
    ),
    (
        lambda: state.mamba_slots(conv={7: zeros(3, 8, 2)}, ssm={}, conv_groups=(4, 6, 6), tp=(0, 4)),
        "6 channels of 'layers.7.conv' cannot be shared by 4 ranks: the width is not divisible",
    ),
    # B and C of a model with one group are not dealt out: each rank holds them whole.
    (
        lambda: state.mamba_slots(conv={7: zeros(8, 96, 3)}, ssm={}, conv_groups=(128, 16, 16), tp=(0, 2)),
        "buffer 'layers.7.conv' of component 'mamba' does not hold the share it should: "
        "an item of the array is channel 96, kernel 3; this rank's share is channel 80, kernel 3\n"
        "hint: a block that each rank holds whole, such as B and C of a model with one group, is given as (width, 1) "
        "in conv_groups",
    ),
    # The numbers of a rank, where those of the whole model are meant.
    (
        lambda: state.mamba_slots(conv={7: zeros(8, 96, 3)}, ssm={}, conv_groups=(64, 16, 16), tp=(0, 2)),
        "buffer 'layers.7.conv' of component 'mamba' does not hold the share it should: "
        "an item of the array is channel 96, kernel 3; this rank's share is channel 48, kernel 3\n"
        "hint: the array has as many on axis 'channel' as the whole model is said to have: 'heads', 'conv_groups' and "
        "the like are the whole model's numbers",
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
    (lambda: state.mamba_slots(conv={}, ssm={}), "component 'mamba' needs buffers"),
    (lambda: state.aux_rows({}), "component 'aux' needs buffers"),
    (lambda: state.aux_rows(zeros(5, 4)), "'rows' of aux_rows is of type ndarray: a dict is expected"),  # type: ignore[arg-type]
    (
        lambda: state.mamba_slots(conv=zeros(3, 8, 2), ssm={}),  # type: ignore[arg-type]
        "'conv' of mamba_slots is of type ndarray: a dict is expected",
    ),
    (lambda: state.aux_rows({"room": zeros(5)}), "array 'room' needs items first and at least one more axis"),
]


@pytest.mark.parametrize(("make", "text"), REFUSED, ids=[text[:50] for _, text in REFUSED])
def test_the_wrong_share_is_refused_by_name(make: Callable[[], object], text: str) -> None:
    with pytest.raises(StateError) as caught:
        make()
    assert str(caught.value).startswith(text)
