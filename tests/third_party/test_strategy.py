"""A strategy of somebody else's package replaces one cell of one backend's table, in the processes that have it.

The pool's items are 96 bytes, of which ten move, none next to another; blocks are counted by the core, on both sides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.third_party.parties import hand_over, parties

if TYPE_CHECKING:
    from pathlib import Path

WITHOUT = {"STATELINK_PLUGINS": "acme-state"}


def test_the_cell_is_carried_by_the_third_partys_strategy(tmp_path: Path) -> None:
    """What decode asks for in `prepare` is what prefill keeps to in `blocks`."""
    with parties(tmp_path, "tcp", "kv", prefill={"ACME_LARGEST": "7"}, decode={"ACME_LARGEST": "40"}) as pair:
        assert hand_over(pair) == 30  # 40 + 40 + 16


def test_without_the_package_the_cell_is_the_backends_own(tmp_path: Path) -> None:
    with parties(tmp_path, "tcp", "kv", prefill=WITHOUT, decode={**WITHOUT, "ACME_LARGEST": "40"}) as pair:
        assert hand_over(pair) <= 10


def test_other_cells_are_left_alone(tmp_path: Path) -> None:
    with parties(tmp_path, "tcp", "acme.trace", decode={"ACME_LARGEST": "40"}) as pair:
        assert hand_over(pair) <= 10


def test_a_package_that_only_one_side_has_is_refused_when_they_connect(tmp_path: Path) -> None:
    with parties(tmp_path, "tcp", "kv", prefill=WITHOUT) as pair:
        text = pair.receive(pair.case(40)).failed()
    assert "with different strategies" in text
    assert "acme.pieces" in text
