"""A source checks the assignment that it is told; both sides compute one digest of a plan, and only of the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from statelink import plan, state
from statelink.errors import MismatchError
from statelink.plan import Assignment, Box, Share

from .oracle.ranks import over_the_wire
from .small import describe, keys, moves, pointer

if TYPE_CHECKING:
    from statelink.state import Inventory

FULL = Box((0, 0), (4, 3))
LEFT, RIGHT = Box((0, 0), (2, 3)), Box((2, 0), (4, 3))


def pair() -> tuple[Inventory, Inventory]:
    """A source with all four heads, and a destination with the upper two; only the source has rows."""
    source = describe(
        "p", keys([0], 4, 2, 4, 3, heads=4), state.aux_rows({"row": pointer(8, 2, 5)}), state.index_pages({0: _none()})
    )
    target = describe("d", keys([0], 4, 2, 2, 3, heads=4, tp=(1, 2)), rank=1, ranks=2)
    return source, target


def _none() -> state.Memory:
    return state.Memory.pointer(0, (0, 2, 3), "uint8", 1)


def share(*boxes: Box, component: str = "kv", buffers: tuple[str, ...] = ("layers.0.k",)) -> Share:
    return Share(component, buffers, boxes)


def told(*shares: Share) -> Assignment:
    return Assignment(0, 1, shares)


def test_what_route_assigns_is_taken() -> None:
    source, target = pair()
    target_only = msgspec.structs.replace(target, rank=0, ranks=1)
    (part,) = plan.route([source], [target_only])
    assert part.shares == (Share("kv", ("layers.0.k", "layers.0.v"), (RIGHT,)),)
    compiled = plan.compile_pair(source, target, told(*part.shares))
    assert compiled.components["kv"].granule_nbytes == 2 * 2 * 3 * 2
    assert compiled.components["kv"].layers == [0]
    assert compiled.assignment == told(*part.shares)


def test_no_shares_are_no_components() -> None:
    source, target = pair()
    compiled = plan.compile_pair(source, target, told())
    assert compiled.components == {}
    assert len(compiled.digest) == 16


CANNOT = "the assignment of buffer 'layers.0.k' of component 'kv' cannot be carried out (source 0, destination 1): "
FORGED: list[tuple[str, tuple[Share, ...], str]] = [
    (
        "unknown component",
        (share(RIGHT, component="swa"),),
        "an assignment names component 'swa': 'd' rank 1 does not have it",
    ),
    (
        "component of the source only",
        (share(Box((0,), (5,)), component="aux", buffers=("row",)),),
        "an assignment names component 'aux': 'd' rank 1 does not have it",
    ),
    (
        "unknown buffer",
        (share(RIGHT, buffers=("layers.9.k",)),),
        "the assignment of buffer 'layers.9.k' of component 'kv' cannot be carried out "
        "(source 0, destination 1): one side does not hold this buffer",
    ),
    ("buffer twice in one share", (share(RIGHT, buffers=("layers.0.k",) * 2),), f"{CANNOT}it is named twice"),
    ("buffer in two shares", (share(RIGHT), share(RIGHT)), f"{CANNOT}it is named twice"),
    ("box that the destination lacks", (share(FULL),), f"{CANNOT}a box of it is not held by both sides"),
    ("box that it holds nothing of", (share(LEFT),), f"{CANNOT}a box of it is not held by both sides"),
    ("box beyond the item", (share(Box((2, 0), (5, 3))),), f"{CANNOT}a box of it is not held by both sides"),
    ("box far beyond", (share(Box((1 << 40, 0), (1 << 41, 3))),), f"{CANNOT}a box of it is not held by both sides"),
    ("negative box", (share(Box((-2, 0), (4, 3))),), f"{CANNOT}a box of it is not held by both sides"),
    ("no box", (share(),), f"{CANNOT}0 boxes; 1 to "),
    ("empty box", (share(Box((2, 0), (2, 3))),), f"{CANNOT}Box(start=(2, 0), stop=(2, 3)) is not a box of 2 axes"),
    ("reversed box", (share(Box((4, 3), (2, 0))),), f"{CANNOT}Box(start=(4, 3), stop=(2, 0)) is not a box of 2 axes"),
    ("too few axes", (share(Box((2,), (4,))),), f"{CANNOT}Box(start=(2,), stop=(4,)) is not a box of 2 axes"),
    (
        "too many axes",
        (share(Box((2, 0, 0), (4, 3, 1))),),
        f"{CANNOT}Box(start=(2, 0, 0), stop=(4, 3, 1)) is not a box of 2 axes",
    ),
    ("uneven axes", (share(Box((2,), (4, 3))),), f"{CANNOT}Box(start=(2,), stop=(4, 3)) is not a box of 2 axes"),
    ("no axes", (share(Box((), ())),), f"{CANNOT}Box(start=(), stop=()) is not a box of 2 axes"),
    (
        "box twice",
        (share(RIGHT, RIGHT),),
        f"{CANNOT}Box(start=(2, 0), stop=(4, 3)) overlaps another box",
    ),
    (
        "boxes that overlap",
        (share(Box((2, 0), (4, 2)), Box((3, 1), (4, 3))),),
        f"{CANNOT}Box(start=(3, 1), stop=(4, 3)) overlaps another box",
    ),
]


@pytest.mark.parametrize(("shares", "text"), [case[1:] for case in FORGED], ids=[case[0] for case in FORGED])
def test_a_forged_assignment_is_refused(shares: tuple[Share, ...], text: str) -> None:
    source, target = pair()
    with pytest.raises(MismatchError) as caught:
        plan.compile_pair(source, target, told(*shares))
    assert caught.value.code == "mismatch.assignment"
    assert str(caught.value).startswith(text)


def test_many_boxes_are_refused_before_they_are_compared() -> None:
    source, target = pair()
    crumbs = tuple(Box((2 + n // 3 % 2, n % 3), (3 + n // 3 % 2, n % 3 + 1)) for n in range(100_000))
    with pytest.raises(MismatchError, match="100000 boxes; 1 to "):
        plan.compile_pair(source, target, told(share(*crumbs)))


def test_a_destination_whose_layouts_shatter_everything_is_refused() -> None:
    """Each of its buffers has another layout, element by element: tables for all of them would take gigabytes."""
    count, rows, width = 80, 64, 512
    shape, axes = (rows, width), ("row", "element")

    def inventory(name: str, transposed: bool) -> Inventory:
        buffers = []
        for number in range(count):
            strides = (1, rows + number) if transposed else (width, 1)
            layout = state.Layout("uint8", 1, shape, axes, (state.Slab((0, 0), shape, 0, strides),))
            buffers.append(state.Buffer(f"b{number}", number, 0, layout.nbytes, 2, layout))
        regions = tuple(state.Region((number + 1) << 30, 1 << 20) for number in range(count))
        return state.Inventory(
            instance=name,
            regions=regions,
            components=(state.Component(name="aux", type="aux", buffers=tuple(buffers)),),
        )

    source, target = inventory("p", False), inventory("d", True)
    names = tuple(f"b{number}" for number in range(count))
    shares = (Share("aux", names, (Box((0, 0), shape),)),)
    with pytest.raises(MismatchError, match="the two sides cut each other into too many pieces"):
        plan.compile_pair(source, target, Assignment(0, 0, shares))
    few = (Share("aux", names[:4], (Box((0, 0), shape),)),)
    assert plan.compile_pair(source, target, Assignment(0, 0, few)).components["aux"].granule_nbytes == 4 * rows * width


def test_a_buffer_without_items_cannot_be_assigned() -> None:
    source, _ = pair()
    sharing = describe("d", state.index_pages({0: pointer(9, 4, 2, 3)}), rank=1, ranks=2)
    with pytest.raises(MismatchError, match="one side does not hold this buffer"):
        plan.compile_pair(source, sharing, told(share(Box((0,), (3,)), component="dsa", buffers=("layers.0.index_k",))))


def test_sides_of_other_geometry_are_refused_although_the_box_fits() -> None:
    source, _ = pair()
    other = describe("d", state.mla_pages({0: pointer(1, 4, 2, 3)}), rank=1, ranks=2)
    renamed = msgspec.structs.replace(other.components[0].buffers[0], name="layers.0.k")
    other = msgspec.structs.replace(
        other, components=(msgspec.structs.replace(other.components[0], buffers=(renamed,)),)
    )
    for box in (Box((0,), (3,)), RIGHT):
        with pytest.raises(MismatchError) as caught:
            plan.compile_pair(source, other, told(share(box)))
        assert caught.value.code == "mismatch.assignment"


def test_less_than_a_destination_holds_is_a_part_like_any_other() -> None:
    """What of a destination a source writes is the destination's affair; the rest is not touched."""
    source, target = pair()
    cell = Box((3, 1), (4, 2))
    found = moves(source, target, told(share(cell)), "kv", ([1], [2]), tokens=2)
    # Source page 1: 24 bytes a page, 12 a token, head 3 at 9, dim 1. Destination page 2: 12 a page, 6 a token.
    assert [(s % (1 << 40), t % (1 << 40), n) for s, t, n in found] == [(24 + 10, 24 + 4, 1), (24 + 22, 24 + 10, 1)]


def test_boxes_may_come_in_any_order_and_in_pieces() -> None:
    source, target = pair()
    pieces = [Box((head, dim), (head + 1, dim + 1)) for head in (3, 2) for dim in (2, 0, 1)]
    one = moves(source, target, told(share(RIGHT)), "kv", ([1], [2]), tokens=2)
    assert moves(source, target, told(share(*pieces)), "kv", ([1], [2]), tokens=2) == one


def test_components_that_share_a_layout_are_cut_each_in_its_own_way() -> None:
    """One layout object in two components, one of them dealt out: a granule of the one is no page of the other.

    Components of one process may share it; what comes over the wire has layouts of its own.
    """

    def side(name: str, partition: state.Partition) -> Inventory:
        pages = state.mla_pages({0: pointer(1, 4, 8, 2)})
        dealt = state.mla_pages({0: pointer(2, 4, 8, 2)}, name="dealt", partition=partition)
        (buffer,) = dealt.component.buffers
        same = msgspec.structs.replace(buffer, layout=pages.component.buffers[0].layout)
        component = msgspec.structs.replace(dealt.component, buffers=(same,))
        return describe(name, pages, dealt._replace(component=component))

    source, target = side("p", state.Partition()), side("d", state.Partition("cyclic", 2, 0, 1))
    for names in (("kv", "dealt"), ("dealt", "kv")):
        shares = tuple(Share(name, ("layers.0.latent",), (Box((0,), (2,)),)) for name in names)
        components = plan.compile_pair(source, target, Assignment(0, 0, shares)).components
        assert {name: each.granule for name, each in components.items()} == {"kv": 8, "dealt": 1}
        assert {name: each.granule_nbytes for name, each in components.items()} == {"kv": 16, "dealt": 2}


def sides(**fields: Any) -> tuple[Inventory, Inventory]:
    given = {"order": "nhd", "page": 2, "pages": 4, **fields}
    page, pages, order = given["page"], given["pages"], given["order"]
    source = describe("p", keys([0, 1], 4, 2, 4, 3, heads=4), model="m")
    target = describe("d", keys([0, 1], pages, page, 4, 3, heads=4, order=order), model="m")
    return source, target


def digest(source: Inventory, target: Inventory, part: Assignment | None = None) -> bytes:
    (routed,) = plan.route([source], [target])
    return plan.compile_pair(source, target, part or routed).digest


def test_both_sides_agree_whatever_way_the_plan_came() -> None:
    source, target = sides()
    (part,) = plan.route([source], [target])
    here = plan.compile_pair(source, over_the_wire(target), over_the_wire(part)).digest
    there = plan.compile_pair(over_the_wire(source), target, part).digest
    assert here == there
    assert len(here) == 16


def test_where_memory_lies_does_not_matter() -> None:
    source, target = sides()
    moved = tuple(
        msgspec.structs.replace(
            each,
            regions=tuple(msgspec.structs.replace(region, address=region.address + 4096) for region in each.regions),
        )
        for each in (source, target)
    )
    assert digest(moved[0], moved[1]) == digest(source, target)


PART = Share("kv", ("layers.0.k", "layers.0.v", "layers.1.k", "layers.1.v"), (Box((0, 0), (4, 3)),))
ASSIGNMENTS = {
    "other source": Assignment(1, 0, (PART,)),
    "other destination": Assignment(0, 1, (PART,)),
    "fewer buffers": Assignment(0, 0, (Share("kv", PART.buffers[:3], PART.boxes),)),
    "other order": Assignment(0, 0, (Share("kv", PART.buffers[::-1], PART.boxes),)),
    "smaller box": Assignment(0, 0, (Share("kv", PART.buffers, (Box((0, 0), (4, 2)),)),)),
    "two boxes": Assignment(0, 0, (Share("kv", PART.buffers, (Box((0, 0), (2, 3)), Box((2, 0), (4, 3)))),)),
    "two shares": Assignment(
        0, 0, (Share("kv", PART.buffers[:1], PART.boxes), Share("kv", PART.buffers[1:], PART.boxes))
    ),
    "nothing": Assignment(0, 0, ()),
}


def test_every_assignment_has_a_digest_of_its_own() -> None:
    source, target = sides()
    (routed,) = plan.route([source], [target])
    assert routed == Assignment(0, 0, (PART,))
    found = {name: digest(source, target, part) for name, part in ASSIGNMENTS.items()}
    found["routed"] = digest(source, target)
    assert len(set(found.values())) == len(found)


CHANGED: dict[str, Callable[[], tuple[Inventory, Inventory]]] = {
    "page order": lambda: sides(order="hnd"),
    "page size": lambda: sides(page=1),
    "number of pages": lambda: sides(pages=5),
    "model": lambda: (sides()[0], msgspec.structs.replace(sides()[1], model="n")),
    "instance": lambda: (msgspec.structs.replace(sides()[0], instance="q"), sides()[1]),
    "another component": lambda: (
        sides()[0],
        describe("d", keys([0, 1], 4, 2, 4, 3, heads=4), state.aux_rows({"row": pointer(9, 2, 2)}), model="m"),
    ),
    "sides exchanged": lambda: sides()[::-1],
}


@pytest.mark.parametrize("name", CHANGED)
def test_another_geometry_has_another_digest(name: str) -> None:
    part = Assignment(0, 0, (PART,))
    assert digest(*sides(), part) == digest(*sides(), part)
    source, target = CHANGED[name]()
    assert plan.compile_pair(source, target, part).digest != digest(*sides(), part)
