"""Both sides compute one digest of a plan, and only of the same plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from statelink import plan, state
from statelink.link._verify import digest_of
from statelink.plan import Assignment, Box, Share
from statelink.state import Memory

from .engine import over_the_wire
from .small import describe, keys, pointer

if TYPE_CHECKING:
    from statelink.state import Inventory


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


def test_a_digest_covers_which_part_of_the_state_the_bytes_are() -> None:
    """The same bytes, as other heads, another layer, another name or other positions, have another digest."""
    memory = np.arange(1 << 12, dtype=np.int64).view(np.uint8)

    def content(first: int = 0, layer: int = 0, name: str = "kv", tokens: int = 4, side: str = "source") -> int:
        arrays = [Memory.pointer(1 << 20, (4, 2, 2, 3), "uint8", 1), Memory.pointer(1 << 21, (4, 2, 2, 3), "uint8", 1)]
        fields: Any = {"heads": 4, "tp": (first // 2, 2), "name": name}
        made = describe("x", state.kv_pages({layer: (arrays[0], arrays[1])}, **fields))
        boxes = (Box((first, 0), (first + 2, 3)),)
        share = Share(name, (f"layers.{layer}.k", f"layers.{layer}.v"), boxes)
        component = plan.compile_pair(made, made, Assignment(0, 0, (share,))).components[name]
        owed = plan.due(component.source, component.target, tokens, tokens - 4)
        items = plan.required(component.target, tokens, tokens - 4, [1, 2])
        if side == "target":
            found = plan.arrived_content(component, items, owed)
        else:
            found = plan.plan_move(component, items, items, owed).content()
        return digest_of(found, memory=lambda address, nbytes: memory[address % 1024 : address % 1024 + nbytes])

    assert content() == content(side="target")
    others = [content(first=2), content(layer=1), content(name="other"), content(tokens=6)]
    assert len({content(), *others}) == 5
