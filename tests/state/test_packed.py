"""Raw pages of recurrent layers: every state where it is packed, padding left out, or a refusal that says why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from statelink import state
from statelink.errors import StateError
from statelink.state import PackedState

from .look import elements, names, zeros

CONV, SSM = (6, 3), (2, 2, 4)
STATES = (PackedState("conv", CONV, "float16", 2), PackedState("ssm", SSM, "float32", 4))
SIZE = 2 * 18 + 4 * 16


def raw(slots: int = 4, size: int = SIZE + 12) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed=3).integers(0, 256, (slots, size), np.uint8)


def test_each_state_is_found_where_it_is_packed() -> None:
    pages = {5: raw(), 6: raw()}
    made = state.packed_slots(pages, states=STATES, conv_groups=[4, 8], heads=4, tp=(1, 2), name="g0")
    assert (made.component.type, made.component.name) == ("mamba", "g0")
    assert names(made) == ["layers.5.conv", "layers.5.ssm", "layers.6.conv", "layers.6.ssm"]
    inventory = state.describe("p", [made])
    for layer, array in pages.items():
        conv = array[:, :36].view(np.float16).reshape(4, *CONV)
        ssm = array[:, 36 : 36 + 64].copy().view(np.float32).reshape(4, *SSM)
        found = elements(inventory, "g0", f"layers.{layer}.conv")
        assert {key[1] for key in found} == {2, 3, 8, 9, 10, 11}
        rows = {2: 0, 3: 1, 8: 2, 9: 3, 10: 4, 11: 5}
        assert all(given == conv[slot, rows[n], k].tobytes() for (slot, n, k), given in found.items())
        found = elements(inventory, "g0", f"layers.{layer}.ssm")
        assert {key[1] for key in found} == {2, 3}
        assert all(given == ssm[slot, h - 2, a, b].tobytes() for (slot, h, a, b), given in found.items())


def test_the_buffers_are_those_of_separate_arrays() -> None:
    separate = state.mamba_slots(
        conv={5: zeros(4, *CONV, dtype="float16")},
        ssm={5: zeros(4, *SSM, dtype="float32")},
        heads=2,
        conv_groups=[2, 4],
    )
    packed = state.packed_slots({5: raw()}, states=STATES, heads=2, conv_groups=[2, 4])
    assert state.describe("p", [packed]).diff(state.describe("d", [separate])) == []


def test_both_orders_of_a_convolution_pair() -> None:
    swapped = (PackedState("conv", (3, 6), "float16", 2), STATES[1])
    one = state.packed_slots({5: raw()}, states=STATES, heads=2)
    other = state.packed_slots({5: raw()}, states=swapped, heads=2, transposed=True)
    assert one.component.buffers[0].layout.shape == other.component.buffers[0].layout.shape == (6, 3)
    assert one.component.buffers[0].layout.slabs[0].strides == (6, 2)
    assert other.component.buffers[0].layout.slabs[0].strides == (2, 12)


def test_several_convolutions_and_opaque_states_are_numbered() -> None:
    states = [PackedState("conv", (2, 3), "int8", 1)] * 3 + [PackedState("opaque", (5,), "int8", 1)] * 2
    made = state.packed_slots({0: raw()}, states=states)
    assert names(made) == [f"layers.0.{each}" for each in ("conv.0", "conv.1", "conv.2", "opaque.0", "opaque.1")]
    assert [buffer.offset for buffer in made.component.buffers] == [0, 6, 12, 18, 23]


def test_opaque_states_go_to_the_rank_of_the_same_number_and_to_no_other_width() -> None:
    def side(name: str, tp: tuple[int, int]) -> state.Inventory:
        states = [PackedState("opaque", (2, 5), "float32", 4)]
        return state.describe(name, [state.packed_slots({0: raw()}, states=states, tp=tp)], rank=tp[0], ranks=tp[1])

    two = side("p", (1, 2))
    (slab,) = two.components[0].buffers[0].layout.slabs
    assert (slab.start, slab.stop) == ((1, 0), (2, 10))
    assert two.diff(side("d", (1, 2))) == []
    assert [each.path for each in two.diff(side("d", (0, 1)))] == ["mamba/layers.0.opaque.0: extent of axis 'rank'"]


@pytest.mark.parametrize(
    ("array", "states", "what"),
    [
        (zeros(4, SIZE - 1), STATES, rf"raw pages of layer 0 cannot hold .* pages of {SIZE - 1} elements of 1 bytes"),
        (zeros(4, SIZE, dtype="float16"), STATES, "elements of 2 bytes"),
        (zeros(4, 2 * SIZE)[:, ::2], STATES, "2 bytes apart"),
        (zeros(4, SIZE), (), "0 states of 0 bytes"),
        (zeros(4, 1, SIZE), STATES, r"needs the axes \[slots, bytes\]"),
    ],
)
def test_pages_that_cannot_hold_the_states_are_refused(array: Any, states: Any, what: str) -> None:
    with pytest.raises(StateError, match=what):
        state.packed_slots({0: array}, states=states, heads=2)


def test_a_share_of_heads_or_channels_that_is_not_the_ranks_is_refused() -> None:
    with pytest.raises(StateError, match=r"'layers\.0\.ssm' .* does not hold the share it should"):
        state.packed_slots({0: raw()}, states=STATES, heads=2, tp=(0, 2))
    with pytest.raises(StateError, match=r"'layers\.0\.conv' .* does not hold the share it should"):
        state.packed_slots({0: raw()}, states=STATES, heads=2, conv_groups=[2, 2])


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (("rnn", (1,), "int8", 1), "no packed state is of kind 'rnn': one of|no packed state is of kind 'rnn'"),
        (("conv", (), "int8", 1), "an extent above zero on each axis"),
        (("conv", (2, 0), "int8", 1), "an extent above zero on each axis"),
        (("conv", (2, 2), "int8", 0), "an extent above zero on each axis"),
        (("conv", (2.5, 2), "int8", 1), "a whole number is expected"),
    ],
)
def test_a_packed_state_says_what_it_is(given: Any, what: str) -> None:
    with pytest.raises(StateError, match=what):
        PackedState(*given)
