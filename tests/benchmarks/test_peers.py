"""`benchmarks.peers`: each peer meets the link once, and a room that fails leaves no row."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from benchmarks import peers

from statelink.errors import StatelinkError

if TYPE_CHECKING:
    import statelink

ROOT = Path(__file__).parents[2]
PAGES = peers.TOKENS * 2 * 8
"""Bytes of one request and layer: a page of keys, and one of values."""


def test_each_peer_and_each_room_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the link counted itself, at the end of the benchmark."""
    links: list[statelink.Link] = []
    seen: list[dict[str, Any]] = []
    opened, counted = peers.opened, peers.counted

    def kept(role: str, backend: str, name: str, pages: peers.Pages) -> statelink.Link:
        links.append(opened(role, backend, name, pages))
        return links[-1]

    def looked(link: statelink.Link, role: str, count: int) -> int:
        seen.append(link.snapshot())
        return counted(link, role, count)

    monkeypatch.setattr(peers, "opened", kept)
    monkeypatch.setattr(peers, "counted", looked)
    for role in ("prefill", "decode"):
        row = peers.measure(role, "tcp", 3, 2, rest=0.1)
        assert (row["peers"], row["as"], row["layers"], row["rooms"]) == (3, role, 2, 4), "the first one is not counted"
        # At least those of the connection: threads and files that several peers share may begin meanwhile.
        assert row["threads_a_peer"] >= 1
        assert row["files_a_peer"] > 1
        assert row["connect_processor_ms_a_peer"] > 0
    for role, snapshot in zip(("prefill", "decode"), seen, strict=True):
        assert sum(snapshot["totals"]["bytes"][role]["kv"].values()) == 4 * 2 * PAGES
        assert len({each["instance"] for each in snapshot["ranks"]}) == 4
    assert len(links) == 2
    assert multiprocessing.active_children() == []


def test_a_room_that_fails_here_leaves_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = peers.begin

    def wrong(link: statelink.Link, role: str, room: int, peer: str) -> Any:
        begun = begin(link, role, room, peer)
        if room == 3:
            begun.abort()
        return begun

    monkeypatch.setattr(peers, "begin", wrong)
    with pytest.raises(StatelinkError, match="room 3"):
        peers.measure("decode", "tcp", 3, 1, rest=0.1)
    assert multiprocessing.active_children() == []


def test_a_process_that_dies_leaves_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = peers.begin

    def wrong(link: statelink.Link, role: str, room: int, peer: str) -> Any:
        if room == 3:
            (other,) = (each for each in multiprocessing.active_children() if each.name == "peers")
            other.kill()
            other.join()
        return begin(link, role, room, peer)

    monkeypatch.setattr(peers, "begin", wrong)
    monkeypatch.setattr(peers, "PATIENCE", 10.0)
    with pytest.raises((StatelinkError, EOFError, OSError)):
        peers.measure("decode", "tcp", 3, 1, rest=0.1)


@pytest.mark.parametrize(
    "seen",
    [
        {"totals": {"rooms": {}}, "peers": {"a": "ready"}},
        {"totals": {"rooms": {"decode": {"succeeded": 1, "room.aborted": 1}}}, "peers": {"a": "ready"}},
        {"totals": {"rooms": {"decode": {"succeeded": 2}}}, "peers": {"a": "ready"}},
        {"totals": {"rooms": {"decode": {"succeeded": 1}}}, "peers": {"a": "ready", "b": "ready"}},
    ],
)
def test_other_counts_leave_no_row(seen: dict[str, Any]) -> None:
    class Link:
        def snapshot(self) -> dict[str, Any]:
            return seen

    with pytest.raises(SystemExit, match="the link counted"):
        peers.counted(Link(), "decode", 1)  # type: ignore[arg-type]  # what it asks of a link


def test_what_is_held_is_that_of_this_process() -> None:
    before, done = peers.held(), threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    kept = bytearray(64 << 20)
    with open(sys.executable, "rb"):
        during = peers.held()
    done.set()
    thread.join()
    assert during["threads"] == before["threads"] + 1
    assert during["files"] == before["files"] + 1
    assert during["resident_KiB"] >= before["resident_KiB"] + len(kept) / 1024 / 2


def test_the_command_prints_a_row_for_each_role() -> None:
    command = [sys.executable, "-m", "benchmarks.peers", "--peers", "2", "--layers", "1", "--rest", "0.1", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["as"], row["peers"], row["rooms"]) for row in rows] == [("prefill", 2, 3), ("decode", 2, 3)]
