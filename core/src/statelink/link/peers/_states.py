"""The states of peers, as two tables: of a prefill instance as decode sees it, and of a decode rank as prefill sees it.

A step that a table does not list is not taken: a job that found something out about an earlier state comes too late.
"""

from __future__ import annotations

import enum

__all__ = ["DECODE_RANK", "INSTANCE", "InstanceEvent", "InstanceState", "RankEvent", "RankState"]


class InstanceState(enum.Enum):
    """How far a prefill instance is, as decode sees it."""

    RESOLVING = "resolving"
    """Its addresses are being found."""
    GREETING = "greeting"
    """Its ranks, and this instance's other ranks, are being asked who they are."""
    PLANNING = "planning"
    """The route is being computed."""
    ATTACHING = "attaching"
    """Its ranks are told their parts, and the backends connect."""
    READY = "ready"
    """Rooms may be requested."""
    REFUSED = "refused"
    """One side refused; rooms fail with the reason, and it is tried again after a while."""
    GONE = "gone"
    """Forgotten, since nobody waited for it; it is found anew when somebody does."""


class InstanceEvent(enum.Enum):
    """What happens to a prefill instance."""

    FOUND = "its addresses are known"
    ANSWERED = "everybody has answered"
    ROUTED = "the route is computed"
    CONFIRMED = "every rank confirmed its part, and the backends reach each other"
    LOST = "a rank is gone"
    REFUSED = "one side refused"
    RETRIED = "somebody asks for it again after a while"
    DROPPED = "nobody waits for it"


_S, _E = InstanceState, InstanceEvent
INSTANCE: dict[InstanceState, dict[InstanceEvent, InstanceState]] = {
    _S.RESOLVING: {_E.FOUND: _S.GREETING, _E.REFUSED: _S.REFUSED},
    _S.GREETING: {_E.ANSWERED: _S.PLANNING, _E.LOST: _S.GREETING, _E.REFUSED: _S.REFUSED, _E.DROPPED: _S.GONE},
    _S.PLANNING: {_E.ROUTED: _S.ATTACHING, _E.LOST: _S.GREETING, _E.REFUSED: _S.REFUSED},
    _S.ATTACHING: {_E.CONFIRMED: _S.READY, _E.LOST: _S.GREETING, _E.REFUSED: _S.REFUSED},
    _S.READY: {_E.LOST: _S.GREETING, _E.REFUSED: _S.REFUSED},
    _S.REFUSED: {_E.RETRIED: _S.RESOLVING, _E.DROPPED: _S.GONE},
    _S.GONE: {},
}


class RankState(enum.Enum):
    """How far a decode rank is, as prefill sees it."""

    GREETED = "greeted"
    """It introduced itself, and was welcomed."""
    ATTACHING = "attaching"
    """It named this rank's part; the plan is being compiled, and the backend connects."""
    ATTACHED = "attached"
    """It may ask for rooms."""
    GONE = "gone"
    """It was lost, or closed. It is greeted anew when it speaks again."""


class RankEvent(enum.Enum):
    """What happens to a decode rank."""

    ASSIGNED = "it named this rank's part"
    COMPILED = "the part is checked, and the backend reaches it"
    REFUSED = "the part cannot be right, or the backend cannot reach it"
    LOST = "it is gone"


_C, _H = RankState, RankEvent
DECODE_RANK: dict[RankState, dict[RankEvent, RankState]] = {
    _C.GREETED: {_H.ASSIGNED: _C.ATTACHING, _H.LOST: _C.GONE},
    # It says so again while it has no answer, and anew when another rank of its instance came back.
    _C.ATTACHING: {
        _H.ASSIGNED: _C.ATTACHING,
        _H.COMPILED: _C.ATTACHED,
        _H.REFUSED: _C.GREETED,
        _H.LOST: _C.GONE,
    },
    _C.ATTACHED: {
        _H.ASSIGNED: _C.ATTACHING,
        _H.COMPILED: _C.ATTACHED,
        _H.REFUSED: _C.GREETED,
        _H.LOST: _C.GONE,
    },
    _C.GONE: {},
}
