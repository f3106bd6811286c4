"""A snapshot is taken on any thread: what the control thread adds to meanwhile must not end it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from statelink.link._destinations import Destinations
from statelink.link._instances import Instances
from statelink.link._receiving import Receiving
from statelink.link._sending import Sending


class Growing:
    """Something in a table, to which another is added whenever it is looked at."""

    def __init__(self, table: dict[str, Any]) -> None:
        self._table = table

    def __getattr__(self, name: str) -> Any:
        self._table[f"{len(self._table)}"] = Growing(self._table)
        return SimpleNamespace(value="stage", name="peer") if name in ("stage", "source") else ()


@pytest.mark.parametrize(
    ("call", "table"),
    [
        (Receiving._held, "_writers"),
        (Sending._held, "_deliveries"),
        (Destinations.snapshot, "_destinations"),
        (Instances.snapshot, "_instances"),
    ],
    ids=["receiving", "sending", "destinations", "instances"],
)
def test_tables_that_grow_meanwhile(call: Any, table: str) -> None:
    growing: dict[str, Any] = {}
    growing["0"] = Growing(growing)
    assert call(SimpleNamespace(**{"_items": {}, "_named": {}, table: growing}))
    assert len(growing) > 1
