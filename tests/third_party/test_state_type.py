"""A state type of somebody else's package moves over every backend, and no backend was changed for it."""

from __future__ import annotations

from tests.third_party.parties import hand_over, start


def test_a_third_partys_type_moves(backend: str) -> None:
    left, arrived = hand_over(backend, "acme.trace")
    assert arrived["digest"] == left["digest"]
    assert arrived["clean"]


def test_without_the_package_the_type_is_unknown_by_name() -> None:
    process = start("prefill", "tcp", "acme.trace", environment={"STATELINK_PLUGINS": ""})
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "no state type named 'acme.trace'" in errors
