"""What cannot work is refused before the first byte, and the message says what differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from statelink import plan, state
from statelink.errors import MismatchError, StateError
from statelink.state import Component, Described, Inventory, Partition

from .small import describe, instance_of, keys, kv_share, pointer, ranks


def kv(name: str = "p", **fields: Any) -> Inventory:
    given = {"layers": [0], "pages": 4, "page": 2, "local": 4, "dim": 3, "heads": 4, **fields}
    return describe(name, keys(given.pop("layers"), **given))


def changed(made: Inventory, number: int = 0, **fields: Any) -> Inventory:
    buffers = list(made.components[0].buffers)
    buffers[number] = msgspec.structs.replace(buffers[number], **fields)
    component = msgspec.structs.replace(made.components[0], buffers=tuple(buffers))
    return msgspec.structs.replace(made, components=(component, *made.components[1:]))


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


@pytest.mark.parametrize("change", ["one k", "one layer", "the component"])
def test_a_draft_under_two_names_is_refused(change: str) -> None:
    """What is optional may be missing; a part of it, or all of it under another name, is no draft that is missing."""

    def draft(layers: Sequence[int], name: str = "draft") -> Described:
        return keys(layers, 4, 2, 4, 3, heads=4, name=name, optional=True)

    made = draft([8, 9])
    first, *rest = made.component.buffers
    renamed = (msgspec.structs.replace(first, name="layers.8.key"), *rest)
    other = {
        "one k": made._replace(component=msgspec.structs.replace(made.component, buffers=renamed)),
        "one layer": draft([8, 10]),
        "the component": draft([8, 9], "drafts"),
    }[change]
    for sides in ((made, other), (other, made)):
        prefill, decode = (instance_of(name, [kv_share(), each]) for name, each in zip("pd", sides, strict=True))
        with pytest.raises(MismatchError, match=r"draft.*present on decode, absent on prefill"):
            plan.match(prefill, decode)
    plan.match(instance_of("p", [kv_share(), made]), instance_of("d", [kv_share(), draft([8])]))
    plan.match(instance_of("p", [kv_share()]), instance_of("d", [kv_share(), made]))


@pytest.mark.parametrize("widths", [(1, 1), (2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("groups", [None, (32, 16, 16), (16, 16, 32)])
def test_blocks_of_a_convolution_are_compared(widths: tuple[int, int], groups: tuple[int, ...] | None) -> None:
    def side(name: str, width: int, blocks: tuple[int, ...] | None) -> list[Inventory]:
        arrays = {0: pointer(1, 3, 64 // width, 2)}
        ranks = ([state.mamba_slots(conv=arrays, ssm={}, conv_groups=blocks, tp=(r, width))] for r in range(width))
        return instance_of(name, *ranks)

    sides = side("p", widths[0], (16, 16, 32)), side("d", widths[1], groups)
    if groups == (16, 16, 32):
        plan.match(*sides)
        return
    said = str(list(groups)) if groups else "one"
    with pytest.raises(MismatchError) as caught:
        plan.match(*sides)
    assert f"conv: blocks of axis 'channel': {said} on decode, [16, 16, 32] on prefill" in str(caught.value)


@pytest.mark.parametrize("kind", [{"type": "qsa_pending"}, {"type": "swa", "page": 4, "window": 4}])
def test_spare_rows_are_said_with_the_constructor(kind: dict[str, Any]) -> None:
    """Rings of 8 rows, and of 16 where decode speculates: each at its own stride, and the second half untouched."""
    arrays = np.arange(4 * 8 * 3, dtype=np.uint16).reshape(4, 8, 3), np.zeros((4, 16, 3), np.uint16)

    def described(number: int, spare: Any) -> Inventory:
        return state.describe("x", [state.whole_items({"ring": arrays[number]}, spare=spare, **kind)])

    source, target = described(0, 0), described(1, 8)
    with pytest.raises(MismatchError, match="extent of axis 'axis0': 16 on decode, 8 on prefill"):
        plan.match([source], [described(1, 0)])
    plan.match([source], [target])
    [part] = plan.route([source], [target])
    [component] = plan.compile_pair(source, target, part).components.values()
    items = plan.pushed(component.source, 4, 0, (0, 4), [3])
    wanted = plan.required(component.target, 4, 0, [2])
    move = plan.plan_move(component, items, wanted, plan.due(component.source, component.target, 4, 0))
    [batch] = move.blocks()
    assert batch.nbytes.tolist() == [8 * 3 * 2]
    assert int(batch.source[0]) - arrays[0].ctypes.data == 3 * 8 * 3 * 2
    assert int(batch.target[0]) - arrays[1].ctypes.data == 2 * 16 * 3 * 2
    for wrong in (-1, 16, 1.0):
        with pytest.raises(StateError, match="spare"):
            described(1, wrong)


def pages(page: int = 4, heads: int = 2, **fields: Any) -> Inventory:
    arrays = [state.Memory.pointer(0x1000 * (n + 1), (8, page, heads, 2), "uint8", 1) for n in range(2)]
    return state.describe("x", [state.kv_pages({0: (arrays[0], arrays[1])}, heads=heads, **fields)])


@pytest.mark.parametrize(
    ("prefill", "decode", "text"),
    [
        (1.0, 2.0, "kv/layers.0.k: scale: 2.0 on decode, 1.0 on prefill"),
        (None, 2.0, "kv/layers.0.k: scale: 2.0 on decode, None on prefill"),
        (0.5, None, "kv/layers.0.k: scale: None on decode, 0.5 on prefill"),
    ],
)
def test_scales_that_differ_are_refused(prefill: float | None, decode: float | None, text: str) -> None:
    sides = [pages(scales={0: (scale, 1.0)}) for scale in (prefill, decode)]
    with pytest.raises(MismatchError) as caught:
        plan.match([sides[0]], [sides[1]])
    assert text in str(caught.value)
    plan.match([sides[0]], [sides[0]])


def compressed(page: int, rows: int) -> Inventory:
    array = state.Memory.pointer(0x1000, (8, rows, 3), "uint8", 1)
    return state.describe("x", [state.compressed_pages({0: {"kv": array}}, page=page)])


def test_rows_that_stand_for_different_numbers_of_positions_are_refused() -> None:
    with pytest.raises(MismatchError, match="positions a row: 4 on decode, 3 on prefill"):
        plan.match([compressed(6, 2)], [compressed(8, 2)])


def scales(partition: Partition) -> Inventory:
    array = state.Memory.pointer(0x1000, (8, 10), "uint8", 1)
    return state.describe("x", [state.whole_items({"k": array}, type="block_scale", page=4, partition=partition)])


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize("dealing", ["prefill", "decode"])
def test_items_that_dealing_would_cut_are_refused(block: int, dealing: str) -> None:
    """Decode context parallelism deals single tokens: an item without rows cannot be dealt out so."""
    sides = {"prefill": scales(Partition()), "decode": scales(Partition())}
    sides[dealing] = scales(Partition("cyclic", 2, 0, block))
    with pytest.raises(MismatchError) as caught:
        plan.match([sides["prefill"]], [sides["decode"]])
    assert "an item without an axis of positions would be cut" in str(caught.value)
    assert f"positions dealt out in blocks of {block} on {dealing}" in str(caught.value)
    plan.match([scales(Partition())], [scales(Partition("cyclic", 2, index, 8)) for index in range(2)])
