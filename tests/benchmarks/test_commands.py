"""Benchmarks that `make bench` does not run: each measures what it was asked to."""

from __future__ import annotations

from benchmarks import fleet, peers, plan


def test_each_client_of_a_fleet_is_found() -> None:
    found = fleet.measure("server", 19, rest=0.2)
    assert [found[name] for name in ("registered", "found", "left")] == [16] * 3, "only whole instances register"


def test_each_peer_has_a_room() -> None:
    for role in ("prefill", "decode"):
        row = peers.measure(role, "tcp", 3, 2, rest=0.1)
        assert (row["peers"], row["layers"], row["rooms"]) == (3, 2, 4), "the first one is not counted"


def test_the_planner_moves_what_it_was_asked_to() -> None:
    row = plan.measure(3, 64, "half", (1, 1), 1)
    assert row["bytes"] == 2 * 3 * 64 * 64 << 10, "pages of 64 KiB"
