"""What a third party's package looks like that brings a state type, and nothing else."""

from __future__ import annotations

from statelink import hookimpl
from statelink.state import Coverage, IndexSpace, StateType

TRACE = StateType(
    name="acme.trace",
    index=IndexSpace.PAGE,
    coverage=Coverage.WHOLE,
    doc="Token-level bookkeeping of an engine, in pages that cover the whole request.",
)


@hookimpl
def statelink_state_types() -> list[StateType]:
    """The types of this package."""
    return [TRACE]
