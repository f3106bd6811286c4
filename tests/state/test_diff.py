"""The diff names every field on which two sides disagree, and no other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from statelink import state
from statelink.state import Difference, Inventory, Memory

from .look import zeros


def kv(heads: int = 4, dim: int = 6, page: int = 8, dtype: str = "uint8", **fields: Any) -> state.Described:
    _, width = fields.get("tp", (0, 1))
    shape = (5, page, max(1, heads // width), dim)
    if fields.get("order") == "hnd":
        shape = (5, shape[2], page, dim)
    return state.kv_pages({3: (zeros(*shape, dtype=dtype), zeros(*shape, dtype=dtype))}, heads=heads, **fields)


def swa(window: int = 16) -> state.Described:
    return state.kv_pages({1: (zeros(5, 4, 2, 3), zeros(5, 4, 2, 3))}, heads=2, window=window)


def chunked(group: int) -> state.Described:
    return state.kv_pages({1: (zeros(5, 4, 2, 3), zeros(5, 4, 2, 3))}, heads=2, attention_chunk=group)


def dsa(items: int = 5) -> state.Described:
    return state.index_pages({3: zeros(items, 8, 4)})


def mamba(groups: tuple[int, ...] = (4, 8), kernel: int = 3, **fields: Any) -> state.Described:
    return state.mamba_slots(conv={2: zeros(3, sum(groups), kernel)}, ssm={}, conv_groups=groups, **fields)


def one(*described: state.Described, **fields: Any) -> Inventory:
    return state.describe("rank", described, **fields)


def said(ours: Inventory, theirs: Inventory) -> list[tuple[str, str, str]]:
    forward = [(each.path, each.ours, each.theirs) for each in ours.diff(theirs)]
    # What the one side sees is what the other sees.
    backward = sorted((each.path, each.theirs, each.ours) for each in theirs.diff(ours))
    assert sorted(forward) == backward
    return forward


def optional(made: Inventory) -> Inventory:
    components = tuple(
        msgspec.structs.replace(
            component, buffers=tuple(msgspec.structs.replace(buffer, optional=True) for buffer in component.buffers)
        )
        for component in made.components
    )
    return msgspec.structs.replace(made, components=components)


def changed(made: Inventory, **fields: Any) -> Inventory:
    first, *rest = made.components[0].buffers
    component = msgspec.structs.replace(made.components[0], buffers=(msgspec.structs.replace(first, **fields), *rest))
    return msgspec.structs.replace(made, components=(component, *made.components[1:]))


@pytest.mark.parametrize(
    "theirs",
    [
        one(kv(), swa(), dsa(), mamba()),
        one(mamba(), dsa(), swa(), kv()),
        one(kv(tp=(1, 2)), swa(), dsa(), mamba()),
        one(kv(order="hnd"), swa(), dsa(), mamba()),
        one(kv(page=2), swa(), dsa(), mamba()),
        one(kv(), swa(), dsa(items=0), mamba()),
        one(kv(), swa(), dsa(), mamba(), rank=1, ranks=2, axes={"tp": (1, 2)}),
    ],
    ids=["equal", "order", "share", "page order", "page size", "elided", "coordinates"],
)
def test_what_may_differ_is_not_named(theirs: Inventory) -> None:
    assert said(one(kv(), swa(), dsa(), mamba()), theirs) == []


CASES = [
    (one(kv(), model="a"), one(kv(), model="b"), [("model", "'a'", "'b'")]),
    (one(kv()), one(kv(), mamba()), [("mamba", "absent", "present")]),
    (
        one(kv()),
        one(state.aux_rows({"x": zeros(4, 8)}, name="kv")),
        [
            ("kv: type", "kv", "aux"),
            ("kv/layers.3.k", "present", "absent"),
            ("kv/layers.3.v", "present", "absent"),
            ("kv/x", "absent", "present"),
        ],
    ),
    (one(kv(format="bf16")), one(kv(format="nvfp4")), [("kv: format", "'bf16'", "'nvfp4'")]),
    (one(swa(16)), one(swa(32)), [("swa: window", "16", "32")]),
    (one(chunked(16)), one(chunked(32)), [("chunked_local: group", "16", "32")]),
    (
        one(kv()),
        one(kv(dtype="int8")),
        [("kv/layers.3.k: dtype", "uint8", "int8"), ("kv/layers.3.v: dtype", "uint8", "int8")],
    ),
    (
        one(kv(dtype="float16")),
        one(kv(dtype="float32")),
        [
            ("kv/layers.3.k: dtype", "float16", "float32"),
            ("kv/layers.3.k: itemsize", "2", "4"),
            ("kv/layers.3.v: dtype", "float16", "float32"),
            ("kv/layers.3.v: itemsize", "2", "4"),
        ],
    ),
    (
        one(kv(heads=4)),
        one(kv(heads=8)),
        [(f"kv/layers.3.{part}: extent of axis 'head'", "4", "8") for part in "kv"],
    ),
    (
        one(kv(dim=6)),
        one(kv(dim=8)),
        [(f"kv/layers.3.{part}: extent of axis 'dim'", "6", "8") for part in "kv"],
    ),
    (one(mamba((4, 8))), one(mamba((4, 4))), [("mamba/layers.2.conv: extent of axis 'channel'", "12", "8")]),
    (one(mamba((4, 8))), one(mamba((8, 4))), [("mamba/layers.2.conv: blocks of axis 'channel'", "[4, 8]", "[8, 4]")]),
    (one(mamba((4, 8))), one(mamba((12,))), [("mamba/layers.2.conv: blocks of axis 'channel'", "[4, 8]", "one")]),
    (one(mamba(kernel=3)), one(mamba(kernel=4)), [("mamba/layers.2.conv: extent of axis 'kernel'", "3", "4")]),
    (
        one(kv()),
        changed(one(kv()), layer=7),
        [("kv/layers.3.k: layer", "3", "7")],
    ),
    (
        one(swa()),
        changed(one(swa()), count=0),
        [("swa/layers.1.k: items", "5", "0")],
    ),
    (
        one(state.aux_rows({"a": zeros(4, 8)})),
        one(state.aux_rows({"a": zeros(4, 2, 4)})),
        [
            ("aux/a: axes", "('axis0',)", "('axis0', 'axis1')"),
            ("aux/a: shape of an item", "(8,)", "(2, 4)"),
        ],
    ),
    (
        one(state.aux_rows({"a": zeros(4, 8), "b": zeros(4, 8)})),
        one(state.aux_rows({"a": zeros(4, 8), "c": zeros(4, 8)})),
        [("aux/b", "present", "absent"), ("aux/c", "absent", "present")],
    ),
]


@pytest.mark.parametrize(("ours", "theirs", "expected"), CASES, ids=[str(case[2][0][0]) for case in CASES])
def test_every_field_that_differs_is_named(
    ours: Inventory, theirs: Inventory, expected: list[tuple[str, str, str]]
) -> None:
    assert sorted(said(ours, theirs)) == sorted(expected)


def test_a_page_without_an_axis_of_positions_cannot_change_its_size() -> None:
    def whole(page: int) -> Inventory:
        layout = state.Layout("uint8", 1, (6,), ("width",), (state.Slab((0,), (6,), 0, (1,)),))
        buffer = state.Buffer("layers.0.k", 0, 0, 6, 4, layout, 0)
        component = state.Component(name="kv", type="kv", page=page, buffers=(buffer,))
        return Inventory(instance="rank", components=(component,), regions=(state.Region(1, 24),))

    assert said(whole(16), whole(16)) == []
    assert said(whole(16), whole(32)) == [
        ("kv: tokens an item (buffer layers.0.k has no position axis to split on)", "16", "32")
    ]


def test_what_is_optional_may_be_missing() -> None:
    both, target = one(kv(), mamba()), one(kv())
    assert said(optional(both), target) == []
    assert said(both, optional(target)) == [("mamba", "present", "absent")]
    draft = state.kv_pages({9: (zeros(5, 8, 4, 6), zeros(5, 8, 4, 6))}, heads=4, name="draft", optional=True)
    assert said(one(kv(), draft), one(kv())) == []


def test_many_differences_are_all_there() -> None:
    ours = one(kv(), swa(), mamba(), model="a")
    theirs = one(kv(dtype="int8", dim=7), swa(9), dsa(), model="b")
    paths = {path for path, _, _ in said(ours, theirs)}
    assert paths == {
        "model",
        "kv/layers.3.k: dtype",
        "kv/layers.3.v: dtype",
        "kv/layers.3.k: extent of axis 'dim'",
        "kv/layers.3.v: extent of axis 'dim'",
        "swa: window",
        "mamba",
        "dsa",
    }


def test_a_difference_reads_as_a_sentence() -> None:
    assert str(Difference("kv: window", "16", "32")) == "kv: window: 16 here, 32 there"


def test_memory_without_addresses_of_its_own_is_compared_all_the_same() -> None:
    rows = Memory.pointer(1 << 63, (4, 8), "uint8", 1)
    assert said(one(state.aux_rows({"a": rows})), one(state.aux_rows({"a": zeros(9, 8)}))) == []
