"""Declarations that cannot be: the error names the field and the value."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from statelink.backend import Fence, SubmitMode, Tally, boot_id
from statelink.tcp import TcpBackend
from statelink.testing import bare_machine


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ({"max_blocks": 0}, "max_blocks is at least 1, and not 0"),
        ({"stalled_peers": -1}, "stalled_peers is -1: it is between 0 and "),
        ({"stalled_peers": 10**6}, "stalled_peers is 1000000: it is between 0 and "),
        ({"stalled_peers": 2, "thread_safe": False}, "stalled_peers is 2 and thread_safe is False: "),
        ({"prompt_bytes": -5}, "prompt_bytes is -5: it is at least 0"),
        ({"prompt_bytes": 64, "stalled_peers": 1}, "prompt_bytes is 64 and stalled_peers is 1: "),
        ({"joins_rooms": True}, "joins_rooms is True and target is Fence.OWNER"),
        ({"priority": -1}, "priority is -1: it is between 0 and 100"),
        ({"priority": 101}, "priority is 101: it is between 0 and 100"),
        ({"block_seconds": 5}, "block_seconds is 5: it is at least 0 and below 1"),
        ({"block_seconds": -0.5}, "block_seconds is -0.5: it is at least 0 and below 1"),
        ({"landing_seconds": 61.0}, "landing_seconds is 61.0: it is between 0 and 60"),
    ],
)
def test_a_value_that_cannot_be(declared: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        dataclasses.replace(TcpBackend.capabilities, submit_mode=SubmitMode.BLOCKING, **declared)


def test_the_boot_id_of_a_machine(tmp_path: Path) -> None:
    place = "proc/sys/kernel/random/boot_id"
    assert boot_id() == Path(f"/{place}").read_text().strip()
    with bare_machine(tmp_path):
        assert not boot_id()
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text("a" * 65 + "\n")
        assert boot_id() == "a" * 64
        (tmp_path / place).write_bytes(b"\xff")
        assert not boot_id()


def test_a_tally_is_logged_ever_more_seldom() -> None:
    tally = Tally()
    assert [number for number in range(1, 70) if tally.note("flood")] == [1, 2, 4, 8, 16, 32, 64]
    assert tally.note("another")
    assert tally == {"flood": 69, "another": 1}


@pytest.mark.parametrize("priority", [0, 100])
def test_the_first_and_the_last_priority_are_taken(priority: int) -> None:
    assert dataclasses.replace(TcpBackend.capabilities, priority=priority).priority == priority


def test_an_owners_fence_where_nothing_is_granted_is_refused() -> None:
    with pytest.raises(ValueError, match=r"source is Fence\.OWNER: only a target has that fence"):
        dataclasses.replace(TcpBackend.capabilities, source=Fence.OWNER)


def test_a_fence_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="target is 'mover': it is a Fence"):
        dataclasses.replace(TcpBackend.capabilities, target="mover")  # type: ignore[arg-type]
