"""What a declaration refuses, by name."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import pytest

from statelink.backend import Fence, Op, Side
from statelink.tcp import TcpBackend


@pytest.mark.parametrize("priority", [-1, 101, 1000])
def test_a_priority_that_auto_does_not_have_is_refused(priority: int) -> None:
    with pytest.raises(ValueError, match=f"priority is between 0 and 100, and not {priority}"):
        dataclasses.replace(TcpBackend.capabilities, priority=priority)


@pytest.mark.parametrize("priority", [0, 100])
def test_the_first_and_the_last_priority_are_taken(priority: int) -> None:
    assert dataclasses.replace(TcpBackend.capabilities, priority=priority).priority == priority


@pytest.mark.parametrize(
    ("op", "side"), [(op, side) for op in Op for side in Side if (op, side) != (Op.WRITE, Side.TARGET)]
)
def test_an_owners_fence_where_nothing_is_granted_is_refused(op: Op, side: Side) -> None:
    fences = {(each, end): Fence.MOVER for each in Op for end in Side}
    fences[op, side] = Fence.OWNER
    where = rf"only the target of a WRITE has Fence\.OWNER.*\(Op\.{op.name}, Side\.{side.name}\)"
    with pytest.raises(ValueError, match=where):
        dataclasses.replace(TcpBackend.capabilities, ops=frozenset(Op), fences=MappingProxyType(fences))
