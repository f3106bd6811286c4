"""What decode works out one by one for few ranges: the same as numpy does for many."""

from __future__ import annotations

from collections import deque
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from statelink import state
from statelink.backend import Ranges, _ranges
from statelink.errors import StatelinkError
from statelink.link.decode import _part, _role
from statelink.link.decode._part import Grantable
from statelink.plan import Items, _items, compile_pair, pushed, route

if TYPE_CHECKING:
    from statelink.plan import PairPlan
    from statelink.state import Inventory

CASES = 2000
TOP = 1 << 64


def u64(*values: int) -> Any:
    return np.array(values, np.uint64)


@pytest.fixture
def random() -> Random:
    return Random(7)


def chosen(random: Random) -> list[tuple[int, int]]:
    """Addresses and lengths: mostly ranges that fit, near the beginning or the end of what 64 bits can address."""
    base = random.choice([0, 100, TOP - 60])
    edges = sorted(random.sample(range(60), 2 * random.randint(0, 8)))
    found = [(base + low, high - low) for low, high in zip(edges[::2], edges[1::2], strict=True)]
    for at in range(len(found) - 1):
        if random.random() < 0.3:  # up to the next one
            found[at] = found[at][0], found[at + 1][0] - found[at][0]
    if found and random.random() < 0.3:  # anything
        found[random.randrange(len(found))] = random.randrange(TOP), random.choice([0, 1, 7, TOP - 1])
    return found


def made(pairs: list[tuple[int, int]]) -> Ranges | None:
    try:
        return Ranges(u64(*(at for at, _ in pairs)), u64(*(nbytes for _, nbytes in pairs)))
    except ValueError:
        return None


def test_few_ranges_are_those_that_many_would_be(random: Random, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = outside = 0
    for _ in range(CASES):
        given, blocks = chosen(random), chosen(random)
        for at, (address, nbytes) in enumerate(blocks):
            if given and random.random() < 0.7:
                low, most = random.choice(given)
                blocks[at] = (low + random.randint(0, min(most, 9))) % TOP, max(most - random.randint(-1, 9), 0) % TOP
            assert 0 <= address < TOP > nbytes
        columns = u64(*(at for at, _ in blocks)), u64(*(nbytes for _, nbytes in blocks))
        few, more = made(given), made(chosen(random))
        with monkeypatch.context() as patch:
            patch.setattr(_ranges, "BLOCKS_ONE_BY_ONE", -1)
            many = made(given)
            assert (few is None) is (many is None), given
            expected = many.outside(*columns) if many is not None else None
        refused += few is None
        if few is None:
            continue
        assert few.outside(*columns) == expected, (given, blocks)
        outside += expected is not None
        if more is not None:
            both = few.union(more)
            inside = [few.outside(u64(at), u64(n)) is None or more.outside(u64(at), u64(n)) is None for at, n in blocks]
            for (at, nbytes), whole in zip(blocks, inside, strict=True):
                assert not whole or both.outside(u64(at), u64(nbytes)) is None
    assert CASES / 20 < refused < CASES / 2
    assert CASES / 20 < outside < CASES


def plan_of(random: Random) -> tuple[Inventory, PairPlan]:
    """Pages, slots and a row, whose buffers lie apart, or one between the items of the other."""
    pages, rows = 16, 8

    def inventory(role: str) -> Inventory:
        whole = np.zeros((pages, 4, 4, 2, 8), np.uint8)
        keys = {0: (whole[:, 0], whole[:, 1]), 1: (whole[:, 2], whole[:, 3])}
        if random.random() < 0.5:
            keys = {
                layer: (np.zeros((pages, 4, 2, 8), np.uint8), np.zeros((pages, 4, 2, 8), np.uint8)) for layer in keys
            }
        return state.describe(
            role,
            [
                state.kv_pages(keys, heads=2),
                state.mamba_slots(conv={1: np.zeros((rows, 8, 3), np.float32)}, ssm={}),
                state.aux_rows({"row": np.zeros((rows, 4), np.int32)}, name="aux"),
            ],
        )

    sender, receiver = inventory("prefill"), inventory("decode")
    (assignment,) = route([sender], [receiver])
    return receiver, compile_pair(sender, receiver, assignment)


def test_few_granted_ranges_are_those_that_many_would_be(random: Random, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(CASES // 10):
        inventory, plan = plan_of(random)
        grantable = Grantable(inventory, plan)
        for _ in range(10):
            ids = {
                "kv": random.sample(range(16), random.randint(0, 7)),
                "mamba": [random.randrange(8)],
                "aux": [random.randrange(8)],
            }
            items = {name: Items(np.array(each, np.int64), 0) for name, each in ids.items()}
            elsewhere = [name for name in ids if random.random() < 0.2]
            few = grantable.ranges(items, elsewhere)
            with monkeypatch.context() as patch:
                patch.setattr(_part, "RANGES_ONE_BY_ONE", -1)
                many = grantable.ranges(items, elsewhere)
            for here, there in zip(few, many, strict=True):
                assert here.dtype == there.dtype == np.uint64
                assert here.tolist() == there.tolist()
            named = {
                address + offset
                for name, each in ids.items()
                if name not in elsewhere
                for buffer in inventory.component(name).buffers
                for item in each
                for address in [inventory.regions[buffer.region].address + buffer.offset + item * buffer.stride]
                for offset in range(buffer.layout.nbytes)
            }
            ranges = zip(few[0].tolist(), few[1].tolist(), strict=True)
            assert {at for low, nbytes in ranges for at in range(low, low + nbytes)} == named


@pytest.mark.parametrize("given", [[3], [0, 1, 2], [2, 0, 1], [1, 1], [-1], [4, 99], [True, 2], list(range(40))])
def test_few_indices_are_looked_at_as_many_would_be(given: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    pages = np.zeros((50, 4, 2, 8), np.uint8)
    component = state.describe("few", [state.kv_pages({0: (pages, pages.copy())}, heads=2)]).component("kv")

    def looked_at() -> str:
        try:
            found = pushed(component, 4 * max(1, len(given)), 0, (0, 4 * len(given)), given)
        except StatelinkError as error:
            return str(error.reason)
        return repr((found.ids.tolist(), found.ids.dtype, found.first))

    few = looked_at()
    monkeypatch.setattr(_items, "INDICES_ONE_BY_ONE", -1)
    assert looked_at() == few


@pytest.mark.parametrize("at_once", [1, 64])
def test_numbers_of_uses_are_drawn_alike(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above zero, of 62 bits, and never the same."""
    monkeypatch.setattr(_role, "GENERATIONS_AT_ONCE", at_once)
    role: Any = SimpleNamespace(_generations=deque())
    drawn = [_role.DecodeRole._draw_generation(role) for _ in range(1000)]
    assert len(set(drawn)) == 1000
    assert all(0 < each <= 1 << 62 for each in drawn)
    assert max(drawn) > 1 << 60
