"""Ranks that share state out by head, over real links: each gets its own heads, and a share too few is refused."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import statelink
from statelink import Link, Status, state
from statelink.errors import ConfigError, StateError
from statelink.testing import free_addresses

SLOTS, RING, HEADS, DIM, WINDOW, TOKENS = 4, 24, 4, 6, 16, 50
Pools = dict[str, npt.NDArray[np.uint8]]
_rooms = itertools.count(90_000)
TRUTH = np.random.default_rng(5).integers(0, 256, (2, TOKENS, HEADS, DIM), np.uint8)


def heads(rank: int, width: int) -> slice:
    each = max(1, HEADS // width)
    first = rank * each if width <= HEADS else rank // (width // HEADS)
    return slice(first, first + each)


def rows(slot: int) -> npt.NDArray[np.int64]:
    """Where the window of the request lies: slot * ring + position mod ring."""
    return slot * RING + np.arange(TOKENS - WINDOW, TOKENS) % RING


class Fleet:
    """Links of both sides in this process; each rank has a ring of keys and one of values, by head."""

    def __init__(self, **shares: Sequence[tuple[int, int]]) -> None:
        self.shares = shares
        self.pools: dict[str, list[Pools]] = {}
        self.links: dict[str, list[Link]] = {}
        for role, ranks in shares.items():
            listen = free_addresses(len(ranks))
            self.pools[role], self.links[role] = [], []
            for number, share in enumerate(ranks):
                part = heads(*share)
                made = {each: np.zeros((SLOTS, RING, part.stop - part.start, DIM), np.uint8) for each in "kv"}
                described = state.ring_rows({3: made}, type="swa_ring", window=WINDOW, heads=HEADS, tp=share)
                inventory = state.describe(role, [described], rank=number, ranks=len(ranks))
                config: dict[str, Any] = {"role": role, "backend": "tcp", "listen": listen[number], "verify": "digest"}
                if role == "decode":
                    config["siblings"] = [address for address in listen if address != listen[number]]
                self.pools[role].append(made)
                self.links[role].append(statelink.open(config, inventory))

    def rooms(self) -> list[Any]:
        """One request, from slot 1 of prefill to slot 2 of decode."""
        room = next(_rooms)
        peer = [link.address for link in self.links["prefill"]]
        for pools, share in zip(self.pools["prefill"], self.shares["prefill"], strict=True):
            for truth, part in zip(TRUTH, "kv", strict=True):
                pools[part].reshape(SLOTS * RING, -1, DIM)[rows(1)] = truth[TOKENS - WINDOW :, heads(*share)]
        receiving = [
            link.receive(room, peer, TOKENS, {"swa_ring": rows(2)}, deadline=20) for link in self.links["decode"]
        ]
        sending = [link.send(room, TOKENS, deadline=20) for link in self.links["prefill"]]
        for each in sending:
            each.push({"swa_ring": rows(1)})
        return [*receiving, *sending]

    def close(self) -> None:
        for link in itertools.chain(*self.links.values()):
            link.close()


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (4, 2), (1, 2), (2, 8)])
def test_rings_go_head_by_head(prefill: int, decode: int) -> None:
    """Also where the widths are equal, and every rank's rows look like every other's."""
    fleet = Fleet(
        prefill=[(rank, prefill) for rank in range(prefill)], decode=[(rank, decode) for rank in range(decode)]
    )
    with contextlib.closing(fleet):
        for room in fleet.rooms():
            assert room.wait(20) is Status.SUCCEEDED, room.reason
        for pools, share in zip(fleet.pools["decode"], fleet.shares["decode"], strict=True):
            for truth, part in zip(TRUTH, "kv", strict=True):
                expected = np.zeros_like(pools[part])
                expected.reshape(SLOTS * RING, -1, DIM)[rows(2)] = truth[TOKENS - WINDOW :, heads(*share)]
                np.testing.assert_array_equal(pools[part], expected)


def test_a_share_of_more_ranks_than_there_are_is_refused_at_once() -> None:
    """Both sides may make this mistake, and would then agree on a part of the heads."""
    keys, values = np.zeros((2, 4, 8, 2, 16), np.uint8)
    layers = {0: (keys, values)}
    halves = state.describe("prefill", [state.kv_pages(layers, heads=4, tp=(1, 2))])
    cyclic = state.Partition("cyclic", size=2, index=0, block=8)
    stripes = state.describe("prefill", [state.kv_pages(layers, heads=2, partition=cyclic)])
    for inventory, said in ((halves, r"its tp is \(1, 2\)"), (stripes, r"its partition is \(0, 2\)")):
        with pytest.raises(StateError, match=said) as error:
            statelink.open({"role": "prefill", "backend": "tcp"}, inventory)
        assert "'kv' is a part of what 2 ranks hold together (instance prefill, rank 0)" in str(error.value)
        assert "ranks=1" in str(error.value)


def test_a_share_of_another_rank_is_refused_unless_the_axes_confirm_it() -> None:
    keys, values = np.zeros((2, 4, 8, 2, 16), np.uint8)
    kv = state.kv_pages({0: (keys, values)}, heads=4, tp=(1, 2))
    config = {"role": "prefill", "backend": "tcp"}
    with pytest.raises(StateError, match=r"its tp is \(1, 2\), and this is rank 0 of 2") as error:
        statelink.open(config, state.describe("prefill", [kv], rank=0, ranks=2))
    assert "pass axes={'tp': (1, 2)} to describe()" in error.value.hint
    statelink.open(config, state.describe("prefill", [kv], rank=0, ranks=2, axes={"tp": (1, 2)})).close()
    statelink.open(config, state.describe("prefill", [kv], rank=0, ranks=4)).close()


def test_a_decode_without_all_heads_is_refused_before_any_room_starts() -> None:
    fleet = Fleet(prefill=[(0, 2), (1, 2)], decode=[(0, 2), (0, 2), (0, 2)])
    with contextlib.closing(fleet):
        for room in fleet.rooms()[:3]:
            assert room.wait(20) is Status.FAILED
            assert room.reason.code == "mismatch.replicas"
            assert "layers.3.k" in str(room.reason)
        assert not any(array.any() for pools in fleet.pools["decode"] for array in pools.values())


def test_a_stage_without_state_is_a_rank_like_any_other() -> None:
    """It opens, hears of each request, and succeeds; a rank that is alone in its instance has state to move."""
    rng = np.random.default_rng(1)
    pages, arrived = rng.integers(0, 256, (8, 4, 64), np.uint8), np.zeros((8, 4, 64), np.uint8)
    listen = free_addresses(2)
    ranks: list[list[state.Described]] = [[], [state.mla_pages({0: pages})]]
    with contextlib.ExitStack() as stack:
        prefill = [
            stack.enter_context(
                statelink.open(
                    {"role": "prefill", "backend": "tcp", "listen": listen[rank]},
                    state.describe("prefill", parts, rank=rank, ranks=2),
                )
            )
            for rank, parts in enumerate(ranks)
        ]
        inventory = state.describe("decode", [state.mla_pages({0: arrived})])
        decode = stack.enter_context(statelink.open({"role": "decode", "backend": "tcp"}, inventory))
        room = next(_rooms)
        receiving = decode.receive(room, listen, 16, {"kv": [4, 5, 6, 7]}, deadline=20)
        sending = [link.send(room, 16, deadline=20) for link in prefill]
        sending[0].push({})
        sending[1].push({"kv": [0, 1, 2, 3]})
        for each in (receiving, *sending):
            assert each.wait(20) is Status.SUCCEEDED, each.reason
    np.testing.assert_array_equal(arrived[4:], pages[:4])
    with pytest.raises(ConfigError, match="the only rank of its instance"):
        statelink.open({"role": "decode", "backend": "tcp"}, state.describe("decode", []))
