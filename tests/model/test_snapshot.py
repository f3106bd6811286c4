"""A snapshot is taken on any thread: what the control thread adds to meanwhile must not end it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from statelink.link.decode._instances import Instances
from statelink.link.decode._receiving_state import ReceivingState
from statelink.link.prefill._decode_ranks import DecodeRanks
from statelink.link.prefill._sending_state import SendingState


class Growing:
    """Something in a table, to which another is added whenever it is looked at."""

    def __init__(self, table: dict[str, Any]) -> None:
        self._table = table

    def __getattr__(self, name: str) -> Any:
        self._table[f"{len(self._table)}"] = Growing(self._table)
        if name == "ranks":
            return {}
        if name == "in_flight":
            return SimpleNamespace(working=0, drained=False, unsettled={})
        return SimpleNamespace(value="state", name="peer") if name in ("state", "rank") else ()


def held_by_decode(growing: dict[str, Any]) -> Any:
    room: Any = SimpleNamespace(_deliveries=growing, _accepted=None, bytes_of=sum)
    return ReceivingState.held(room)


def held_by_prefill(growing: dict[str, Any]) -> Any:
    room: Any = SimpleNamespace(_deliveries=growing, _items={}, bytes_of=sum)
    room.deliveries = SendingState.deliveries.fget(room)  # type: ignore[attr-defined]
    return SendingState.held(room)


def decode_ranks(growing: dict[str, Any]) -> Any:
    ranks: Any = SimpleNamespace(_ranks=growing)
    ranks.known = DecodeRanks.known.fget(ranks)  # type: ignore[attr-defined]
    return DecodeRanks.snapshot(ranks)


def instances(growing: dict[str, Any]) -> Any:
    table: Any = SimpleNamespace(_instances=growing)
    return Instances.snapshot(table)


@pytest.mark.parametrize("call", [held_by_decode, held_by_prefill, decode_ranks, instances])
def test_tables_that_grow_meanwhile(call: Any) -> None:
    growing: dict[str, Any] = {}
    growing["0"] = Growing(growing)
    assert call(growing)
    assert len(growing) > 1
