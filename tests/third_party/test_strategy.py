"""A strategy of somebody else's package replaces one cell of one backend's table, in the processes that have it.

The pool's items are 96 bytes, of which ten move, none next to another; blocks are counted by the core, on both sides.
"""

from __future__ import annotations

import pytest
from tests.third_party.parties import hand_over

WITHOUT = {"STATELINK_PLUGINS": "acme-state"}


def test_the_cell_is_carried_by_the_third_partys_strategy() -> None:
    """What decode asks for in `prepare` is what prefill keeps to in `chunk`."""
    left, arrived = hand_over("tcp", "kv", prefill={"ACME_LARGEST": "7"}, decode={"ACME_LARGEST": "40"})
    assert arrived["digest"] == left["digest"]
    assert arrived["clean"]
    assert left["blocks"] == arrived["blocks"] == 30  # 40 + 40 + 16


def test_without_the_package_the_cell_is_the_backends_own() -> None:
    left, arrived = hand_over("tcp", "kv", prefill=WITHOUT, decode={**WITHOUT, "ACME_LARGEST": "40"})
    assert arrived["digest"] == left["digest"]
    assert left["blocks"] == arrived["blocks"] <= 10


def test_other_cells_are_left_alone() -> None:
    left, arrived = hand_over("tcp", "acme.trace", decode={"ACME_LARGEST": "40"})
    assert arrived["digest"] == left["digest"]
    assert left["blocks"] == arrived["blocks"] <= 10


def test_a_package_that_only_one_side_has_is_refused_when_they_connect() -> None:
    with pytest.raises(AssertionError, match="with different strategies") as caught:
        hand_over("tcp", "kv", prefill=WITHOUT)
    assert "acme.pieces" in str(caught.value)
