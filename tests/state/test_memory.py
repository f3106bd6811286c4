"""Where bytes lie: torch tensors, numpy arrays and raw pointers look the same from here on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from statelink import state
from statelink.errors import StateError
from statelink.state import Memory, Region

from .look import elements, one_buffer


def described(array: Any) -> state.Inventory:
    return state.describe("rank", [state.aux_rows({"row": array})])


def whole() -> np.ndarray[Any, np.dtype[np.uint16]]:
    return np.arange(6 * 5 * 4, dtype=np.uint16).reshape(6, 5, 4)


VIEWS = {
    "whole": lambda a: a,
    "some items": lambda a: a[1:4],
    "every other item": lambda a: a[::2],
    "inner slice": lambda a: a[:, 1:4, 2:],
    "transposed": lambda a: a.transpose(0, 2, 1) if isinstance(a, np.ndarray) else a.permute(0, 2, 1),
    "items last": lambda a: a.transpose(1, 0, 2) if isinstance(a, np.ndarray) else a.permute(1, 0, 2),
    "one item": lambda a: a[3:4],
    "inner step": lambda a: a[:, ::2],
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_view_is_read_as_its_owner_reads_it(kind: str, name: str) -> None:
    root: Any = whole() if kind == "numpy" else torch.arange(120, dtype=torch.int16).reshape(6, 5, 4)
    view = VIEWS[name](root)
    if name == "items last":
        # Items that interleave in memory are not what a stride between items can say.
        with pytest.raises(StateError, match="buffer 'row' of component 'aux' is a transposed array"):
            described(view)
        return
    inventory = described(view)
    found = elements(inventory, *one_buffer(inventory))
    expected = {at: np.asarray(view)[at].tobytes() for at in np.ndindex(*view.shape)}
    assert found == expected
    # The region is the allocation, not the view of it.
    memory = Memory.of(view)
    assert memory.region.nbytes == 240
    assert memory.region == Memory.of(root).region
    assert memory.dtype == ("uint16" if kind == "numpy" else "int16")


@pytest.mark.parametrize(
    ("dtype", "name", "itemsize"),
    [
        (torch.bfloat16, "bfloat16", 2),
        (torch.float16, "float16", 2),
        (torch.float32, "float32", 4),
        (torch.float8_e4m3fn, "float8_e4m3fn", 1),
        (torch.uint8, "uint8", 1),
        (torch.bool, "bool", 1),
        (torch.int64, "int64", 8),
    ],
)
def test_tensors_are_named_by_their_dtype(dtype: torch.dtype, name: str, itemsize: int) -> None:
    memory = Memory.of(torch.zeros(4, 3, dtype=torch.float32).to(dtype))
    assert (memory.dtype, memory.itemsize) == (name, itemsize)
    assert memory.strides == (3 * itemsize, itemsize)
    assert memory.region.kind == "dram"
    assert memory.region.nbytes == 12 * itemsize


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32", "uint64", "bool"])
def test_numpy_and_torch_agree_on_names(dtype: str) -> None:
    assert Memory.of(np.zeros((2, 3), dtype)).dtype == Memory.of(torch.zeros(2, 3, dtype=getattr(torch, dtype))).dtype


def test_an_array_over_someone_elses_memory_is_its_own_region() -> None:
    raw = bytearray(100)
    array = np.frombuffer(raw, np.uint8, 64, 10).reshape(4, 16)
    memory = Memory.of(array)
    assert memory.region == Region(array.ctypes.data, 64)
    shared = torch.from_numpy(np.zeros((4, 16), np.uint8))
    assert Memory.of(shared).region == Memory.of(shared.numpy()).region


def test_a_byte_order_that_is_not_the_machines_is_part_of_the_name() -> None:
    assert Memory.of(np.zeros((2, 2), "<f4")).dtype == "float32"
    assert Memory.of(np.zeros((2, 2), ">f4")).dtype == ">f4"


AB: Any = [("a", "u1"), ("b", "u2")]
NAMES: list[tuple[Any, str]] = [
    (AB, "{'a': uint8 at 0, 'b': uint16 at 1; 3 bytes}"),
    (AB[::-1], "{'b': uint16 at 0, 'a': uint8 at 2; 3 bytes}"),
    ([("c", "u1"), ("b", "u2")], "{'c': uint8 at 0, 'b': uint16 at 1; 3 bytes}"),
    ([("a", "i1"), ("b", "u2")], "{'a': int8 at 0, 'b': uint16 at 1; 3 bytes}"),
    ([("a", "u1"), ("b", ">u2")], "{'a': uint8 at 0, 'b': >u2 at 1; 3 bytes}"),
    (np.dtype(AB, align=True), "{'a': uint8 at 0, 'b': uint16 at 2; 4 bytes}"),
    ({"names": ["b", "a"], "formats": ["u2", "u1"], "offsets": [1, 0]}, "{'a': uint8 at 0, 'b': uint16 at 1; 3 bytes}"),
    ({"names": ["a"], "formats": ["u1"], "itemsize": 3}, "{'a': uint8 at 0; 3 bytes}"),
    ([("a", "u1", (3,))], "{'a': uint8[3] at 0; 3 bytes}"),
    ([("a", [("b", "u2")]), ("c", "u1")], "{'a': {'b': uint16 at 0; 2 bytes} at 0, 'c': uint8 at 2; 3 bytes}"),
    ([(("title", "a"), "u1"), ("b", "u2")], "{'a': uint8 at 0, 'b': uint16 at 1; 3 bytes}"),
    ("V3", "void24"),
]


@pytest.mark.parametrize(("dtype", "name"), NAMES)
def test_a_structured_type_is_named_by_what_its_bytes_mean(dtype: Any, name: str) -> None:
    assert Memory.of(np.zeros((2, 3), dtype)).dtype == name


def test_sides_whose_elements_have_other_fields_do_not_match() -> None:
    sides = {name: described(np.zeros((2, 3), dtype)) for dtype, name in NAMES if np.dtype(dtype).itemsize == 3}
    assert len(sides) > 7
    for one, ours in sides.items():
        for other, theirs in sides.items():
            assert [each.path for each in ours.diff(theirs)] == (["aux/row: dtype"] if one != other else [])


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (torch.zeros(2, 3, dtype=torch.complex64).conj(), "conjugated on access"),
        (torch.zeros(2, 3, dtype=torch.complex64).conj().imag, "negated on access"),
        (np.ma.masked_array(np.zeros((2, 3)), True), "an array with a mask"),
        (np.zeros((2, 3), [("a", object)]), "an array of Python objects"),
        (np.zeros((2, 3), [("a" * 2000, "u1")]), "the element type of an array has 20.. characters"),
    ],
)
def test_bytes_that_do_not_say_their_values_are_refused(array: Any, said: str) -> None:
    with pytest.raises(StateError, match=said):
        Memory.of(array)


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_a_quantised_tensor_is_refused() -> None:
    tensor = torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.quint8)
    with pytest.raises(StateError, match="a tensor that is quantised cannot be described"):
        Memory.of(tensor)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_no_two_types_of_torch_have_one_name() -> None:
    types = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    named = {each: Memory.of(torch.empty(2, 3, dtype=each)).dtype for each in types if "q" not in str(each)}
    assert len(set(named.values())) == len(named) > 30


def test_a_memory_is_returned_as_it_is() -> None:
    memory = Memory.pointer(4096, (2, 3), "uint8", 1)
    assert Memory.of(memory) is memory


def test_a_pointer_is_dense_and_its_own_region_unless_said_otherwise() -> None:
    memory = Memory.pointer(1 << 63, (4, 3, 2), "bfloat16", 2)
    assert memory.strides == (12, 4, 2)
    assert memory.region == Region(1 << 63, 48, "dram")
    assert memory.offset == 0
    strided = Memory.pointer(1000, (4, 3), "uint8", 1, strides=(100, 7), kind="cuda:1")
    assert strided.region == Region(1000, 3 * 100 + 2 * 7 + 1, "cuda:1")
    inside = Memory.pointer(1000, (4, 3), "uint8", 1, region=Region(900, 500, "npu:0"))
    assert inside.offset == 100
    assert inside.region.kind == "npu:0"


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": (-2, 3)},
        {"itemsize": 0},
        {"strides": (3,)},
        {"shape": (2.0, 3)},
        {"address": 4096.0},
        {"strides": (3, None)},
    ],
)
def test_a_pointer_that_is_no_array_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(StateError, match=r"an array|an element"):
        Memory.pointer(**{"address": 4096, "shape": (2, 3), "dtype": "uint8", "itemsize": 1, **wrong})


@pytest.mark.parametrize(
    ("dtype", "itemsize", "known"),
    [
        ("bfloat16", 4, 2),
        ("float16", 4, 2),
        ("float8_e4m3fn", 2, 1),
        ("uint8", 16, 1),
        ("bool", 4, 1),
        ("float32", 2, 4),
    ],
)
def test_a_pointer_whose_elements_have_another_size_than_their_type(dtype: str, itemsize: int, known: int) -> None:
    with pytest.raises(StateError) as caught:
        Memory.pointer(4096, (2, 3), dtype, itemsize)
    assert str(caught.value).startswith(
        f"an element of type {dtype!r} has {known} bytes: {itemsize} were passed as the size of an element\nhint: "
    )
    assert Memory.pointer(4096, (2, 3), dtype, known).itemsize == known


def test_a_type_that_nobody_knows_has_any_size() -> None:
    assert Memory.pointer(4096, (2, 3), "nvfp4 of six", 3).itemsize == 3


def test_a_pointer_reads_what_is_there() -> None:
    array = whole()
    memory = Memory.pointer(array.ctypes.data, array.shape, "uint16", 2, region=Region(array.ctypes.data, array.nbytes))
    assert described(memory) == described(array)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 5, 4), np.uint16),
        torch.zeros(0, 5, 4, dtype=torch.int16),
        Memory.pointer(0, (0, 5, 4), "uint16", 2),
        Memory.pointer(77, (0, 5, 4), "uint16", 2, region=Region(77, 10)),
    ],
    ids=["numpy", "torch", "null pointer", "pointer"],
)
def test_an_array_without_items_keeps_its_place_and_registers_nothing(array: Any) -> None:
    inventory = described(array)
    (buffer,) = inventory.components[0].buffers
    assert buffer.count == 0
    assert inventory.regions == ()
    assert buffer.layout.shape == (5, 4)


@pytest.mark.parametrize(
    ("thing", "name"),
    [([1, 2], "builtins.list"), (b"bytes", "builtins.bytes"), (5, "builtins.int"), (None, "builtins.NoneType")],
)
def test_what_is_no_array_is_refused_with_what_to_pass(thing: Any, name: str) -> None:
    with pytest.raises(StateError) as caught:
        Memory.of(thing)
    assert str(caught.value) == (
        f"cannot read memory from a {name}\n"
        "hint: pass a tensor of torch, an array of numpy, one with DLPack, or Memory.pointer(address, shape, ...)"
    )


def test_what_has_no_bytes_of_its_own_is_refused() -> None:
    with pytest.raises(StateError, match=r"a tensor without memory cannot be described: its device is 'meta'"):
        Memory.of(torch.zeros(2, 2, device="meta"))
    with pytest.raises(StateError, match=r"only a tensor with strides can be described: the layout of this"):
        Memory.of(torch.eye(2).to_sparse())
    with pytest.raises(StateError, match="an array of Python objects has no state to move: its dtype is object"):
        Memory.of(np.empty((2, 2), object))


@pytest.mark.parametrize(
    "array",
    [
        np.broadcast_to(np.zeros(4, np.uint8), (3, 4)),
        torch.zeros(1, 4).expand(3, 4),
        np.zeros((4, 6), np.uint8)[:, ::-1],
        np.lib.stride_tricks.as_strided(np.zeros(100, np.uint8), (3, 4, 4), (30, 2, 1)),
        np.broadcast_to(np.zeros((3, 1), np.uint8), (3, 4)),
    ],
    ids=["broadcast items", "expanded tensor", "reversed", "overlapping windows", "broadcast elements"],
)
def test_arrays_whose_elements_share_bytes_or_run_backwards_are_refused(array: Any) -> None:
    with pytest.raises(StateError):
        described(array)


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.broadcast_to(np.zeros((1, 4), np.int16), (6, 4)), "zero, as of an expanded array"),
        (np.zeros((6, 4), np.int16)[::-1], "negative, as of a reversed view"),
    ],
)
def test_items_that_are_not_one_after_the_other(array: Any, why: str) -> None:
    with pytest.raises(StateError, match=why):
        described(array)
