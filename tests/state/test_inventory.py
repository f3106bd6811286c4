"""Every struct of an inventory refuses what contradicts itself, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from statelink.errors import StateError
from statelink.state import Axis, Buffer, Component, Inventory, Layout, Partition, Region, Slab

PAGE = Layout("uint8", 1, (4, 6), ("token", "width"), (Slab((0, 0), (4, 6), 0, (6, 1)),), 0)
ITEM = Layout("uint8", 1, (6,), ("width",), (Slab((0,), (6,), 0, (1,)),))


def buffer(**fields: Any) -> Buffer:
    return Buffer(**{"name": "k", "region": 0, "offset": 0, "stride": 24, "count": 5, "layout": PAGE, **fields})


def component(*buffers: Buffer, **fields: Any) -> Component:
    return Component(**{"name": "kv", "type": "kv", "page": 4, "buffers": buffers or (buffer(),), **fields})


def inventory(*components: Component, **fields: Any) -> Inventory:
    given = {"instance": "p", "regions": (Region(4096, 120),), "components": components or (component(),), **fields}
    return Inventory(**given)


def item_component(**fields: Any) -> Component:
    return component(buffer(layout=ITEM, stride=6), **{"name": "aux", "type": "aux", "page": 0, **fields})


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Region(0, 10), "a region is a range of memory: address 0, 10 bytes"),
    (lambda: Region(-5, 10), "a region is a range of memory: address -5, 10 bytes"),
    (lambda: Region(4096, 0), "a region is a range of memory: address 4096, 0 bytes"),
    (lambda: Region((1 << 64) - 4, 5), f"a region is a range of memory: address {(1 << 64) - 4}, 5 bytes"),
    (lambda: Region(1 << 64, 1), f"a region is a range of memory: address {1 << 64}, 1 bytes"),
    (lambda: Axis(2, 2), "a parallel coordinate lies below its axis's size: 2 of 2"),
    (lambda: Axis(-1, 2), "a parallel coordinate lies below its axis's size: -1 of 2"),
    (lambda: Axis(0, 0), "a parallel coordinate lies below its axis's size: 0 of 0"),
    (lambda: Partition("spread"), "no partition kind 'spread'\nhint: 'all', 'contiguous' or 'cyclic'"),
    (lambda: Partition("cyclic", 2, 2), "a partition has an index below its size: 2 of 2"),
    (lambda: Partition("cyclic", 2, 0, 0), "a partition has an index below its size"),
    (lambda: Partition("all", 2), "partition 'all' has size 1: size is 2"),
    (lambda: Partition("all", block=4), "partition 'all' has no blocks: block is 4"),
    (lambda: Partition("contiguous", 2, 0, 4), "partition 'contiguous' has no blocks: block is 4"),
    (lambda: buffer(name=""), "a buffer needs a printable name of 1 to 255 characters: got ''"),
    (lambda: buffer(name="x" * 256), "a buffer needs a printable name of 1 to 255 characters: got 'xxx"),
    (lambda: buffer(name="a\nb"), "a buffer needs a printable name of 1 to 255 characters: got 'a\\nb'"),
    (lambda: buffer(region=-1), "buffer 'k' has a negative region, offset, stride or count"),
    (lambda: buffer(offset=-1), "buffer 'k' has a negative region, offset, stride or count"),
    (lambda: buffer(count=-1), "buffer 'k' has a negative region, offset, stride or count"),
    (lambda: buffer(stride=-24), "buffer 'k' has a negative region, offset, stride or count"),
    (
        lambda: buffer(stride=23),
        "items of buffer 'k' overlap: an item ends after 24 bytes but the stride is 23",
    ),
    (lambda: component(name=""), "a component needs a printable name of 1 to 255 characters: got ''"),
    (lambda: component(type="kw"), "no state type named 'kw': known types: "),
    (
        lambda: component(page=0),
        "component 'kv' of type 'kv' has 0 positions an item: items of this type stand for positions",
    ),
    (
        lambda: item_component(page=4),
        "component 'aux' of type 'aux' has 4 positions an item: its items are one a request",
    ),
    (lambda: component(window=8), "component 'kv' of type 'kv' has window 8\nhint: "),
    (lambda: component(type="swa"), "component 'kv' of type 'swa' has window None\nhint: "),
    (lambda: component(type="swa", window=0), "component 'kv' of type 'swa' has window 0\nhint: "),
    (
        lambda: Component(name="kv", type="kv", page=4, buffers=()),
        "component 'kv' needs buffers, each with a name of its own",
    ),
    (
        lambda: component(buffer(), buffer()),
        "component 'kv' needs buffers, each with a name of its own: 'k' is named twice",
    ),
    (
        lambda: component(page=6),
        "buffer 'k' of component 'kv' has 4 rows on axis 'token': an item of the component has 6 positions",
    ),
    (
        lambda: component(
            buffer(layout=msgspec.structs.replace(PAGE, slabs=(Slab((1, 0), (4, 6), 0, (6, 1)),))),
        ),
        "a slab of buffer 'k' of component 'kv' holds only some positions of an item: rows [1, 4) of 4",
    ),
    (lambda: inventory(instance=""), "an instance needs a printable name"),
    (lambda: inventory(instance=3), "an instance needs a printable name of 1 to 255 characters: got 3"),
    (lambda: inventory(model=3), "the model's identity is 3: a text is expected"),
    (lambda: inventory(model=None), "the model's identity is None: a text is expected"),
    (
        lambda: inventory(
            component(name="a", share=Axis(0, 2)), component(name="b"), component(name="c", share=Axis(1, 2))
        ),
        "components 'a' and 'c' are of different TP ranks: one holds share 0 of 2, the other share 1",
    ),
    (lambda: inventory(rank=1), "rank 1 of an instance of 1"),
    (lambda: inventory(rank=-1, ranks=2), "rank -1 of an instance of 2"),
    (lambda: inventory(ranks=(1 << 16) + 1), f"rank 0 of an instance of {(1 << 16) + 1}"),
    (
        lambda: inventory(component(), component()),
        "every component has a name of its own: 'kv' is named twice",
    ),
    (
        lambda: inventory(component(buffer(region=1))),
        "buffer 'k' of component 'kv' is in region 1: the inventory has 1",
    ),
    (
        lambda: inventory(component(buffer(offset=1))),
        "buffer 'k' of component 'kv' leaves its region: it ends at byte 121 of 120",
    ),
    (
        lambda: inventory(component(buffer(count=6))),
        "buffer 'k' of component 'kv' leaves its region: it ends at byte 144 of 120",
    ),
    (
        lambda: inventory(component(buffer(count=2), buffer(name="v", count=2, offset=47))),
        "buffers 'k' and 'v' of component 'kv' overlap in memory: a byte that belongs to both would be written twice",
    ),
    (
        lambda: inventory(component(buffer(count=2, stride=30), buffer(name="v", count=2, stride=30, offset=29))),
        "buffers 'k' and 'v' of component 'kv' overlap in memory",
    ),
    (
        lambda: inventory(component(buffer(count=3), buffer(name="v", count=1, offset=24))),
        "buffers 'k' and 'v' of component 'kv' overlap in memory",
    ),
]


@pytest.mark.parametrize(("make", "text"), REFUSED, ids=[text[:60] for _, text in REFUSED])
def test_what_contradicts_itself_is_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(StateError) as caught:
        make()
    assert str(caught.value).startswith(text)


def test_what_is_at_the_edge_is_taken() -> None:
    assert Region((1 << 64) - 5, 5).nbytes == 5
    assert inventory().component("kv").buffers[0].end == 120
    assert inventory(rank=65535, ranks=1 << 16).rank == 65535
    # The stride of a single item means nothing.
    assert buffer(count=1, stride=0).end == 24
    assert buffer(count=0, stride=0).end == 0
    assert inventory(component(buffer(count=0, region=9))).components[0].buffers[0].count == 0
    assert buffer(name="é" * 255).name


def test_buffers_may_interleave_in_one_region() -> None:
    pair = component(buffer(count=2, stride=48), buffer(name="v", count=2, stride=48, offset=24))
    assert inventory(pair).component("kv") == pair
    # Components may share bytes: unified memory is described as pages and as slots at once.
    slots = component(buffer(layout=ITEM, stride=6, count=20), name="mamba", type="mamba", page=0)
    assert len(inventory(component(), slots).components) == 2


def test_a_component_is_found_by_name() -> None:
    made = inventory(component(), item_component())
    assert made.component("aux").kind.name == "aux"
    with pytest.raises(StateError) as caught:
        made.component("mamba")
    assert str(caught.value) == "no component named 'mamba': rank 0 of 'p' has kv, aux"
    with pytest.raises(StateError, match="rank 0 of 'q' has none"):
        Inventory(instance="q", regions=(), components=()).component("kv")


def test_an_older_name_of_a_type_means_the_type() -> None:
    old = component(name="index", type="nsa")
    assert old.kind.name == "dsa"
    assert old.type == "nsa"


def test_structs_cannot_be_changed() -> None:
    made = inventory()
    for thing, field in (
        (made, "rank"),
        (made.regions[0], "address"),
        (made.components[0], "page"),
        (made.components[0].buffers[0], "offset"),
        (PAGE, "dtype"),
    ):
        with pytest.raises(AttributeError):
            setattr(thing, field, 5)


@pytest.mark.parametrize("field", ["components", "regions", "instance"])
def test_an_inventory_that_lacks_a_field_does_not_decode(field: str) -> None:
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(inventory()))
    assert msgspec.convert(raw, Inventory, strict=False) == inventory()
    del raw[field]
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(raw, Inventory)


def test_checks_hold_for_what_comes_over_the_wire() -> None:
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(inventory()))
    raw["components"][0]["buffers"][0]["offset"] = 1
    with pytest.raises(msgspec.ValidationError, match="leaves its region") as caught:
        msgspec.msgpack.decode(msgspec.msgpack.encode(raw), type=Inventory)
    assert isinstance(caught.value.__cause__, StateError)
