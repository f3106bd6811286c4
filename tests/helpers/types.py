"""A state type that only those processes know that register it."""

from __future__ import annotations

from statelink.state import Coverage, IndexSpace, StateType, register_state_type


def register() -> None:
    register_state_type(StateType(name="acme.index", index=IndexSpace.PAGE, coverage=Coverage.SUFFIX, aligned=True))
