"""What cannot work is refused before the first byte, and the message says what differs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from statelink import plan, state
from statelink.errors import MismatchError
from statelink.state import Buffer, Component, Inventory, Layout, Region, Slab

from .small import describe, keys, pointer, ranks


def kv(name: str = "p", **fields: Any) -> Inventory:
    given = {"layers": [0], "pages": 4, "page": 2, "local": 4, "dim": 3, "heads": 4, **fields}
    return describe(name, keys(given.pop("layers"), **given))


def aux(name: str = "p", items: int = 4, width: int = 8) -> Inventory:
    return describe(name, state.aux_rows({"row": pointer(1, items, width)}))


def whole(page: int) -> Inventory:
    """A page that is packed in a way that strides cannot say."""
    layout = Layout("uint8", 1, (6,), ("byte",), (Slab((0,), (6,), 0, (1,)),))
    component = Component(
        name="kv", type="kv", page=page, buffers=(Buffer("layers.0.k", 0, 0, 6, 4, layout, 0),), format="packed"
    )
    return Inventory(instance="p", components=(component,), regions=(Region(1, 24),))


def changed(made: Inventory, number: int = 0, **fields: Any) -> Inventory:
    buffers = list(made.components[0].buffers)
    buffers[number] = msgspec.structs.replace(buffers[number], **fields)
    component = msgspec.structs.replace(made.components[0], buffers=tuple(buffers))
    return msgspec.structs.replace(made, components=(component, *made.components[1:]))


def windowed(window: int) -> Inventory:
    arrays = {0: (pointer(1, 4, 2, 1, 1), pointer(2, 4, 2, 1, 1))}
    return describe("p", state.window_pages(arrays, heads=1, window=window))


MORE = describe("p", keys([0], 4, 2, 4, 3, heads=4), state.aux_rows({"r": pointer(9, 2, 2)}))
HINT = "\nhint: both engines must be configured for the same model, cache dtype and layout"
REFUSED: list[tuple[str, Inventory, Inventory, str]] = [
    (
        "dtype",
        kv(),
        changed(kv(), layout=msgspec.structs.replace(kv().components[0].buffers[0].layout, dtype="int8")),
        "kv/layers.0.k: dtype: int8 on decode, uint8 on prefill",
    ),
    (
        "element size",
        kv(itemsize=2),
        kv(),
        "kv/layers.0.k: dtype: uint8 on decode, bfloat16 on prefill; "
        "kv/layers.0.v: dtype: uint8 on decode, bfloat16 on prefill; "
        "kv/layers.0.k: itemsize: 1 on decode, 2 on prefill; "
        "kv/layers.0.v: itemsize: 1 on decode, 2 on prefill",
    ),
    (
        "heads",
        kv(heads=4, local=4),
        kv(heads=8, local=8),
        "kv/layers.0.k: extent of axis 'head': 8 on decode, 4 on prefill; "
        "kv/layers.0.v: extent of axis 'head': 8 on decode, 4 on prefill",
    ),
    ("format", kv(format="bf16"), kv(format="nvfp4"), "kv: format: 'nvfp4' on decode, 'bf16' on prefill"),
    (
        "page size without positions",
        whole(16),
        whole(32),
        "kv: tokens an item (buffer layers.0.k has no position axis to split on): 32 on decode, 16 on prefill",
    ),
    ("component on decode only", kv(), MORE, "component aux (type aux): present on decode, absent on prefill"),
    ("component on prefill only", MORE, kv(), "component aux (type aux): absent on decode, present on prefill"),
    (
        "layer on decode only",
        kv(layers=[0, 1]),
        kv(layers=[0, 1, 2]),
        "kv/layers.2.k: present on decode, absent on prefill; kv/layers.2.v: present on decode, absent on prefill",
    ),
    (
        "layer on prefill only",
        kv(layers=[0, 1]),
        kv(layers=[0]),
        "kv/layers.1.k: absent on decode, present on prefill; kv/layers.1.v: absent on decode, present on prefill",
    ),
    ("items on one side only", changed(kv(), count=0), kv(), "kv/layers.0.k: items: 4 on decode, 0 on prefill"),
    ("width of a row", aux(width=8), aux(width=9), "aux/row: extent of axis 'axis0': 9 on decode, 8 on prefill"),
    (
        "window",
        windowed(64),
        windowed(128),
        "swa: window: 128 on decode, 64 on prefill",
    ),
]


@pytest.mark.parametrize(
    ("source", "target", "text"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_what_does_not_fit_is_named_with_both_values(source: Inventory, target: Inventory, text: str) -> None:
    target = msgspec.structs.replace(target, instance="d")
    with pytest.raises(MismatchError) as caught:
        plan.match([source], [target])
    assert caught.value.code == "mismatch"
    assert str(caught.value) == (
        f"prefill and decode do not describe the same state (prefill p, decode d): {text}{HINT}"
    )
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("sources", "targets", "text"),
    [
        (["a"], ["b"], "model: 'b' on decode, 'a' on prefill"),
        (["a", "b"], ["a", "a"], "model: 'a' on decode, 'b' on prefill"),
        (["a", "a"], ["a", "b"], "model: 'b' on decode, 'a' on prefill"),
    ],
)
def test_one_rank_of_another_model_is_enough(sources: list[str], targets: list[str], text: str) -> None:
    sides = [
        [
            msgspec.structs.replace(kv(name), rank=rank, ranks=len(models), model=model)
            for rank, model in enumerate(models)
        ]
        for name, models in (("p", sources), ("d", targets))
    ]
    with pytest.raises(MismatchError) as caught:
        plan.match(*sides)
    assert text in str(caught.value)


def test_one_wrong_field_is_one_line_however_many_layers_have_it() -> None:
    layers = [*range(30), 32]
    sides = [kv(layers=layers)], [kv("d", layers=layers, dim=5)]
    assert len(plan.differences(*sides)) == 62
    with pytest.raises(MismatchError) as caught:
        plan.match(*sides)
    assert "): kv/layers.0-29,32.{k,v}: extent of axis 'dim': 5 on decode, 3 on prefill\n" in str(caught.value)


def test_a_long_list_is_cut_and_counted() -> None:
    rows = [state.aux_rows({f"row{n}": pointer(n + 1, 2, 3)}, name=f"aux{n}") for n in range(30)]
    with pytest.raises(MismatchError) as caught:
        plan.match([describe("p", *rows)], [kv("d")])
    assert str(caught.value).count(" on decode, ") == 12
    assert "; and 19 more" in str(caught.value)


def test_every_rank_is_compared_with_every_other() -> None:
    good = ranks("p", 2, lambda rank: keys([0], 4, 2, 2, 3, heads=4, tp=(rank, 2)))
    bad = [good[0], changed(good[1], number=1, layer=9)]
    plan.match(good, [kv("d")])
    for sides in ((bad, [kv("d")]), ([kv("p")], bad)):
        with pytest.raises(MismatchError, match=r"kv/layers\.0\.v: layer"):
            plan.match(*sides)


def test_what_is_optional_may_be_missing_on_the_other_side() -> None:
    draft = keys([9], 4, 2, 4, 3, heads=4, name="draft", optional=True)
    plain = describe("p", keys([0], 4, 2, 4, 3, heads=4))
    more = describe("d", state.aux_rows({"row": pointer(7, 2, 2)}), *(keys([0], 4, 2, 4, 3, heads=4),))
    both = msgspec.structs.replace(
        plain, components=(*plain.components, _moved(draft.component)), regions=(*plain.regions, *plain.regions)
    )
    plan.match([plain], [both])
    plan.match([both], [plain])
    with pytest.raises(MismatchError, match="component aux"):
        plan.match([plain], [more])
    half = msgspec.structs.replace(both, components=(both.components[0], _mandatory(both.components[1])))
    with pytest.raises(MismatchError, match="component draft"):
        plan.match([plain], [half])
    (part,) = plan.route([plain], [both])
    assert {share.component for share in part.shares} == {"kv"}


def test_optional_buffers_that_have_none_in_common_are_no_match() -> None:
    """Draft layers that the two sides number in different ways: to skip them all is no hand-over."""
    layers = [keys(numbers, 4, 2, 4, 3, heads=4, name="draft", optional=True) for numbers in ([9], [8], [8, 9])]
    nine, eight, both = (describe("x", each) for each in layers)
    plan.match([nine], [both])
    plan.match([both], [nine])
    with pytest.raises(MismatchError) as caught:
        plan.match([eight], [nine])
    assert "draft/layers.8.k: absent on decode, present on prefill" in str(caught.value)
    assert "draft/layers.9.v: present on decode, absent on prefill" in str(caught.value)
    plan.match(
        [eight],
        [
            describe("x", keys([0], 4, 2, 4, 3, heads=4, name="draft", optional=True), rank=0, ranks=2),
            describe("x", layers[1], rank=1, ranks=2),
        ],
    )


def _mandatory(component: Component) -> Component:
    """The same, but for its first buffer, which the other side must have."""
    first, *rest = component.buffers
    return msgspec.structs.replace(component, buffers=(msgspec.structs.replace(first, optional=False), *rest))


def _moved(component: Component) -> Component:
    buffers = tuple(msgspec.structs.replace(buffer, region=2 + buffer.region) for buffer in component.buffers)
    return msgspec.structs.replace(component, buffers=buffers)


def test_a_part_that_nobody_holds_is_named_with_its_range() -> None:
    sources = ranks("p", 4, lambda rank: keys([3], 4, 2, 2, 5, heads=8, tp=(rank, 4)))
    targets = ranks("d", 2, lambda rank: keys([3], 4, 2, 4, 5, heads=8, tp=(rank, 2)))
    plan.route(sources, targets)
    with pytest.raises(MismatchError) as caught:
        plan.route([sources[0], sources[1], sources[3]], targets)
    assert caught.value.code == "mismatch.unheld"
    assert str(caught.value) == (
        "no source holds a part of buffer 'layers.3.k' (component kv, decode d, rank 1): "
        "head [4, 6), dim [0, 5) is held by no prefill rank\n"
        "hint: every rank of the prefill instance must be present, and describe what it holds in global coordinates"
    )


def _item(name: str, *slabs: Slab) -> Inventory:
    layout = Layout("uint8", 1, (8,), ("channel",), slabs)
    component = Component(name="mamba", type="mamba", buffers=(Buffer("conv", 0, 0, 8, 2, layout),))
    return Inventory(instance=name, components=(component,), regions=(Region(1, 16),))


@pytest.mark.parametrize("stepped", ["p", "d"])
def test_coordinates_with_gaps_cannot_be_routed(stepped: str) -> None:
    full = Slab((0,), (8,), 0, (1,))
    gaps = Slab((0,), (8,), 0, (1,), (2,))
    sides = [_item(name, gaps if name == stepped else full) for name in "pd"]
    with pytest.raises(MismatchError) as caught:
        plan.route(sides[:1], sides[1:])
    assert caught.value.code == "mismatch.step"
    assert str(caught.value).startswith("slabs with gaps between their coordinates cannot be routed\nhint: ")


@pytest.mark.parametrize("axes", [2, 3, 6])
def test_descriptions_that_shatter_are_refused(axes: int) -> None:
    """What one peer describes must not keep the other busy: each slab has edges of its own on every axis."""
    shape, names = (256,) * axes, tuple("abcdef"[:axes])
    crumbs = tuple(Slab((3 * n,) * axes, (3 * n + 1,) * axes, n, (0,) * axes) for n in range(64))
    dense = Slab((0,) * axes, shape, 0, tuple(256 ** (axes - 1 - axis) for axis in range(axes)))
    sides = []
    for name, slabs in (("p", crumbs), ("d", (dense,))):
        layout = Layout("uint8", 1, shape, names, slabs)
        component = Component(name="aux", type="aux", buffers=(Buffer("row", 0, 0, 0, 1, layout),))
        sides.append(Inventory(instance=name, components=(component,), regions=(Region(1, 1 << 62),)))
    with pytest.raises(MismatchError, match="too many"):
        plan.route(sides[:1], sides[1:])


def _replicated(name: str, width: int) -> list[Inventory]:
    return ranks(name, width, lambda rank: state.mla_pages({n: pointer(n + 1, 4, 2, 3) for n in range(12)}))


def test_sources_that_hold_the_same_share_the_load() -> None:
    parts = plan.route(_replicated("p", 4), _replicated("d", 2))
    buffers = {
        (part.target, part.source): sum(len(share.buffers) for share in part.shares) for part in parts if part.shares
    }
    # Twelve layers for each of two destinations, over four sources.
    assert buffers == {(t, s): 3 for t in (0, 1) for s in range(4)}


def test_a_source_that_nobody_reads_from_is_told_so() -> None:
    parts = plan.route(ranks("p", 8, lambda r: keys([0], 4, 2, 1, 3, heads=1, tp=(r, 8))), [kv("d", heads=1, local=1)])
    busy = {part.source for part in parts if part.shares}
    assert len(busy) == 1  # keys and values of the one layer go together
    assert sorted(part.source for part in parts) == list(range(8))
    many = plan.route(_replicated("p", 8), [_aux_only(rank) for rank in range(3)])
    assert [(part.source, part.target, part.shares) for part in many] == [(s, s % 3, ()) for s in range(8)]


def _aux_only(rank: int) -> Inventory:
    """Nothing that the sources hold, and nothing that is needed from them."""
    described = state.kv_pages({0: (pointer(1, 1, 1, 1, 1), pointer(2, 1, 1, 1, 1))}, heads=1, optional=True, name="x")
    return describe("d", described, rank=rank, ranks=3)
