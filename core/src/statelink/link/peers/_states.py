"""The states of peers, as two tables: of a prefill instance as decode sees it, and of a decode rank as prefill sees it.

An event that a table does not list for a state changes nothing: the job that reports it began in an earlier state.
"""

from __future__ import annotations

import enum

__all__ = ["DECODE_RANK", "INSTANCE", "InstanceEvent", "InstanceState", "RankEvent", "RankState"]


class InstanceState(enum.Enum):
    """How far a prefill instance is, as decode sees it."""

    RESOLVING = "resolving"
    """Its addresses are being found."""
    GREETING = "greeting"
    """The handshakes with its ranks, and with the other ranks of this link's own instance, are under way."""
    PLANNING = "planning"
    """The route is being computed."""
    ATTACHING = "attaching"
    """Its ranks are told their parts, and the backends connect."""
    READY = "ready"
    """This link may send it requests."""
    REFUSED = "refused"
    """One side refused. Rooms fail with the reason; a room that comes after a while makes this link try again."""
    GONE = "gone"
    """Forgotten, since no room needed it. The next room that names it looks it up again."""


class InstanceEvent(enum.Enum):
    """What happens to a prefill instance."""

    FOUND = "its addresses are known"
    MOVED = "it is at other addresses by now"
    ANSWERED = "all handshakes are there"
    ROUTED = "the route is computed"
    CONFIRMED = "every rank confirmed its part, and the backends reach each other"
    LOST = "a rank was lost"
    REFUSED = "one side refused"
    RETRIED = "a room needs it again after a while"
    DROPPED = "no room needs it"


_S, _E = InstanceState, InstanceEvent
INSTANCE: dict[InstanceState, dict[InstanceEvent, InstanceState]] = {
    _S.RESOLVING: {_E.FOUND: _S.GREETING, _E.REFUSED: _S.REFUSED, _E.DROPPED: _S.GONE},
    _S.GREETING: {
        _E.MOVED: _S.GREETING,
        _E.ANSWERED: _S.PLANNING,
        _E.LOST: _S.GREETING,
        _E.REFUSED: _S.REFUSED,
        _E.DROPPED: _S.GONE,
    },
    _S.PLANNING: {_E.ROUTED: _S.ATTACHING, _E.LOST: _S.GREETING, _E.REFUSED: _S.REFUSED},
    _S.ATTACHING: {_E.CONFIRMED: _S.READY, _E.LOST: _S.GREETING, _E.REFUSED: _S.REFUSED},
    _S.READY: {_E.LOST: _S.GREETING, _E.REFUSED: _S.REFUSED},
    _S.REFUSED: {_E.RETRIED: _S.RESOLVING, _E.DROPPED: _S.GONE},
    _S.GONE: {},
}


class RankState(enum.Enum):
    """How far a decode rank is, as prefill sees it."""

    GREETED = "greeted"
    """It sent `Hello` and got `Welcome`."""
    ATTACHING = "attaching"
    """It sent `Attach`, which names this rank's part. The plan is being compiled, and the backend connects."""
    ATTACHED = "attached"
    """It may send requests."""
    GONE = "gone"
    """It was lost, or it closed. If it speaks again, it begins with a new handshake."""


class RankEvent(enum.Enum):
    """What happens to a decode rank."""

    ASSIGNED = "it named this rank's part"
    COMPILED = "the part is checked, and the backend reaches it"
    REFUSED = "the part cannot be right, or the backend cannot reach it"
    LOST = "it was lost"


_C, _H = RankState, RankEvent
DECODE_RANK: dict[RankState, dict[RankEvent, RankState]] = {
    _C.GREETED: {_H.ASSIGNED: _C.ATTACHING, _H.LOST: _C.GONE},
    # Decode repeats `Attach` until it is answered, and attaches again after it lost any rank of this prefill instance.
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
