"""From components to an inventory: shared allocations, overlaps, the trip over the wire, and the digest."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from statelink import state
from statelink.errors import StateError
from statelink.state import Axis, Inventory, Memory, Region

from .look import elements


def pointer(address: int, *shape: int, region: Region | None = None, kind: str = "dram") -> Memory:
    return Memory.pointer(address, shape, "uint8", 1, region=region, kind=kind)


def pages(first: int, second: int, **fields: Any) -> state.Described:
    """K and V of one layer, 96 bytes each."""
    return state.kv_pages({0: (pointer(first, 4, 4, 2, 3), pointer(second, 4, 4, 2, 3))}, heads=2, **fields)


def full(shift: int = 0, **fields: Any) -> Inventory:
    """One of everything, at addresses that are moved by ``shift``."""
    base = (1 << 40) + shift
    described = [
        pages(base, base + (1 << 20)),
        state.kv_pages(
            {1: (pointer(base + (2 << 20), 4, 4, 2, 3), pointer(base + (3 << 20), 4, 4, 2, 3))}, heads=2, window=9
        ),
        state.index_pages({0: pointer(base + (4 << 20), 4, 4, 2), 1: pointer(0, 0, 4, 2)}),
        state.mamba_slots(
            conv={2: pointer(base + (5 << 20), 3, 8, 2)},
            ssm={2: pointer(base + (6 << 20), 3, 2, 5)},
            conv_groups=(4, 4, 8),
            heads=4,
            tp=(1, 2),
        ),
        state.aux_rows({"tokens": pointer(base + (7 << 20), 6, 16)}, replicated=True),
    ]
    given = {"rank": 1, "ranks": 2, "axes": {"tp": (1, 2), "pp": (0, 1)}, "model": "rev-1", **fields}
    return state.describe("decode", described, **given)


def test_who_a_rank_is() -> None:
    made = full()
    assert (made.instance, made.rank, made.ranks, made.model) == ("decode", 1, 2, "rev-1")
    assert made.axes == {"tp": Axis(1, 2), "pp": Axis(0, 1)}
    assert [component.name for component in made.components] == ["kv", "swa", "dsa", "mamba", "aux"]


def test_views_of_one_storage_are_one_region() -> None:
    envelope = torch.arange(6 * 2 * 2 * 4 * 3 * 5).to(torch.int32).reshape(6, 2, 2, 4, 3, 5)
    layers = {layer: (envelope[:, layer, 0], envelope[:, layer, 1]) for layer in range(2)}
    made = state.describe("rank", [state.kv_pages(layers, heads=3)])
    assert made.regions == (Region(envelope.data_ptr(), envelope.numel() * 4),)
    assert {buffer.region for buffer in made.components[0].buffers} == {0}
    assert {buffer.stride for buffer in made.components[0].buffers} == {2 * 2 * 4 * 3 * 5 * 4}
    found = elements(made, "kv", "layers.1.k")
    assert found[5, 3, 2, 4] == envelope[5, 1, 0, 3, 2, 4].numpy().tobytes()


def test_one_allocation_of_several_components_is_registered_once() -> None:
    raw = np.arange(4096, dtype=np.uint8)
    keys = raw[:960].reshape(2, 5, 2, 48)
    slots = raw[1000:1900].reshape(3, 300)
    made = state.describe(
        "rank",
        [state.kv_pages({0: (keys, raw[2000:2960].reshape(2, 5, 2, 48))}, heads=2), state.aux_rows({"row": slots})],
    )
    assert made.regions == (Region(raw.ctypes.data, 4096),)
    assert elements(made, "aux", "row")[2, 7] == slots[2, 7].tobytes()


def test_an_allocation_inside_another_is_registered_with_it() -> None:
    outer = Region(1000, 10_000)
    made = state.describe(
        "rank",
        [
            state.aux_rows({"a": pointer(2000, 4, 8)}, name="inner"),
            state.aux_rows({"b": pointer(5000, 4, 8, region=outer)}, name="outer"),
            state.aux_rows({"c": pointer(20_000, 4, 8)}, name="apart"),
        ],
    )
    assert set(made.regions) == {outer, Region(20_000, 32)}
    where = {
        component.name: made.regions[buffer.region].address + buffer.offset
        for component in made.components
        for buffer in component.buffers
    }
    assert where == {"inner": 2000, "outer": 5000, "apart": 20_000}


def test_memory_of_different_kinds_may_have_the_same_addresses() -> None:
    kinds = ("dram", "cuda:0", "cuda:1")
    made = state.describe(
        "rank", [state.aux_rows({"a": pointer(4096, 4, 8, kind=kind)}, name=f"on {kind}") for kind in kinds]
    )
    assert {region.kind for region in made.regions} == set(kinds)
    assert len(made.regions) == 3
    for component in made.components:
        assert f"on {made.regions[component.buffers[0].region].kind}" == component.name


def test_regions_that_overlap_are_refused_with_what_to_do() -> None:
    with pytest.raises(StateError) as caught:
        state.describe("rank", [state.aux_rows({"a": pointer(4096, 4, 8), "b": pointer(4100, 4, 8)})])
    assert str(caught.value) == (
        "two regions overlap without one holding the other: 32 bytes at 0x1000 and 32 bytes at 0x1004\n"
        "hint: describe the allocation that both lie in as their region"
    )
    whole = Region(4096, 64)
    made = state.aux_rows({"a": pointer(4096, 4, 8, region=whole), "b": pointer(4100, 4, 8, region=whole)})
    with pytest.raises(StateError, match="buffers 'a' and 'b' of component 'aux' overlap in memory"):
        state.describe("rank", [made])


def test_what_is_no_list_of_components_is_refused() -> None:
    given: Any = pages(1 << 20, 1 << 21)
    for wrong, found in ((given, "Component"), ([given.component], "Component"), ([given, 3], "int")):
        with pytest.raises(StateError, match=f"got {found} in it\nhint: one component alone is a list of one"):
            state.describe("here", wrong)


def test_a_pointer_outside_its_region_is_refused_by_name() -> None:
    region = Region(4096, 100)
    with pytest.raises(StateError, match="buffer 'a' of component 'aux' leaves its region: it ends at byte 104 of 100"):
        state.describe("rank", [state.aux_rows({"a": pointer(4096 + 72, 4, 8, region=region)})])
    with pytest.raises(StateError, match="buffer 'a' has a negative region, offset, stride or count"):
        state.aux_rows({"a": pointer(4095, 4, 8, region=region)})


def test_addresses_may_use_all_64_bits() -> None:
    top = (1 << 64) - 32
    made = state.describe("rank", [state.aux_rows({"a": pointer(top, 4, 8)})])
    assert made.regions == (Region(top, 32),)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Inventory) == made


@pytest.mark.parametrize("encoding", [msgspec.msgpack, msgspec.json])
def test_an_inventory_survives_the_trip(encoding: Any) -> None:
    made = full()
    back = encoding.decode(encoding.encode(made), type=Inventory)
    assert back == made
    assert back.digest() == made.digest()
    assert hash(back.components) == hash(made.components)
    # Buffers of one geometry share their layout again: compiling goes by identity.
    (kv, *_) = back.components
    assert kv.buffers[0].layout is kv.buffers[1].layout


def test_the_digest_does_not_depend_on_where_memory_lies() -> None:
    assert len(full().digest()) == 16
    assert full().digest() == full(shift=1 << 50).digest()
    low, high = 1 << 20, 1 << 30
    assert state.describe("p", [pages(low, high)]).digest() == state.describe("p", [pages(high, low)]).digest()


def _renamed(made: Inventory, **changes: Any) -> Inventory:
    return msgspec.structs.replace(made, **changes)


def _component(made: Inventory, **changes: Any) -> Inventory:
    first, *rest = made.components
    return _renamed(made, components=(msgspec.structs.replace(first, **changes), *rest))


def _buffer(made: Inventory, **changes: Any) -> Inventory:
    first, *rest = made.components[0].buffers
    return _component(made, buffers=(msgspec.structs.replace(first, **changes), *rest))


def _layout(made: Inventory, **changes: Any) -> Inventory:
    return _buffer(made, layout=msgspec.structs.replace(made.components[0].buffers[0].layout, **changes))


SLAB = full().components[0].buffers[0].layout.slabs[0]
CHANGES = {
    "instance": lambda made: _renamed(made, instance="other"),
    "rank": lambda made: _renamed(made, rank=0),
    "ranks": lambda made: _renamed(made, ranks=3),
    "axes": lambda made: _renamed(made, axes={"tp": Axis(1, 2), "pp": Axis(0, 2)}),
    "model": lambda made: _renamed(made, model="rev-2"),
    "components": lambda made: _renamed(made, components=made.components[:-1]),
    "order of components": lambda made: _renamed(made, components=made.components[::-1]),
    "bytes of a region": lambda made: _renamed(made, regions=(Region(1 << 40, 97), *made.regions[1:])),
    "kind of a region": lambda made: _renamed(made, regions=(Region(1 << 40, 96, "cuda:0"), *made.regions[1:])),
    "name of a component": lambda made: _component(made, name="kv2"),
    "type": lambda made: _component(made, type="dsa"),
    "format": lambda made: _component(made, format="fp8"),
    "partition": lambda made: _component(made, partition=state.Partition("cyclic", 2, 0, 1)),
    "buffers": lambda made: _component(made, buffers=made.components[0].buffers[:1]),
    "name of a buffer": lambda made: _buffer(made, name="layers.0.q"),
    "region of a buffer": lambda made: _buffer(made, region=2),
    "offset": lambda made: _buffer(made, offset=1, count=3),
    "stride": lambda made: _buffer(made, stride=30, count=3),
    "count": lambda made: _buffer(made, count=3),
    "layer": lambda made: _buffer(made, layer=5),
    "optional": lambda made: _buffer(made, optional=True),
    "dtype": lambda made: _layout(made, dtype="int8"),
    "shape": lambda made: _layout(made, shape=(4, 3, 3)),
    "names of axes": lambda made: _layout(made, axes=("token", "head", "width")),
    "slab": lambda made: _layout(made, slabs=(msgspec.structs.replace(SLAB, stop=(4, 2, 2)),)),
    "strides of a slab": lambda made: _layout(made, slabs=(msgspec.structs.replace(SLAB, strides=(3, 12, 1)),)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_digest_depends_on_everything_else(name: str) -> None:
    made = full()
    changed = CHANGES[name](made)
    assert changed != made
    assert changed.digest() != made.digest()


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


def test_numbers_of_other_libraries_are_pythons_in_the_description() -> None:
    """What engines take from configurations and tensors goes over the wire like any other number."""
    made = []
    for whole, real in ((int, float), (np.int64, np.float64), (torch.tensor, torch.tensor)):
        convert: Any = whole
        scales: Any = {7: (real(0.5), real(2.0))}
        parts = [
            state.kv_pages(
                {7: (pointer(1 << 20, convert(5), 4, 2, 6), pointer(2 << 20, 5, 4, 2, 6))},
                heads=convert(8),
                tp=(convert(1), convert(4)),
                scales=scales,
                partition=state.Partition("cyclic", convert(2), convert(1), convert(4)),
            ),
            state.kv_pages(
                {1: (pointer(3 << 20, 5, 4, 2, 6), pointer(4 << 20, 5, 4, 2, 6))}, heads=2, window=convert(9)
            ),
            state.mamba_slots(conv={1: pointer(5 << 20, 3, 8, 2)}, ssm={}, conv_groups=[convert(4), convert(4)]),
            state.ring_rows({1: {"a": pointer(6 << 20, 3, 8, 2)}}, type="dsa_tail", group=convert(4), replicated=True),
        ]
        given: Any = {"rank": convert(1), "ranks": convert(2), "axes": {"tp": (convert(1), convert(4))}}
        made.append(state.describe("rank", parts, **given))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(made[-1]), type=state.Inventory) == made[0]
    assert len({each.digest() for each in made}) == 1
