"""A state type of somebody else's package moves over every backend, and no backend was changed for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.third_party.parties import hand_over, parties

from statelink.errors import StateError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_third_partys_type_moves(backend: str, tmp_path: Path) -> None:
    with parties(tmp_path, backend, "acme.trace") as pair:
        assert hand_over(pair) <= 10


def test_without_the_package_the_type_is_unknown_by_name(tmp_path: Path) -> None:
    without = {"STATELINK_PLUGINS": ""}
    with (
        pytest.raises(StateError, match=r"no state type named 'acme\.trace'"),
        parties(tmp_path, "tcp", "acme.trace", without, without),
    ):
        pass
