"""Reasons: made from exceptions, and with diagnostics, which say what takes part in the room and what it waited for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from statelink.errors import Reason, StatelinkError

if TYPE_CHECKING:
    from statelink.backend import Backend, ReceiveHook, SendHook

__all__ = ["BackendDefect", "PeerInfo", "hooks_wait_for", "reason_of", "seconds_since", "with_standing"]

MOST_NAMED_PEERS = 8
"""Most peers that a reason names."""
MAX_HOOKS = 4
"""Most hooks that a reason names."""


class BackendDefect(Exception):
    """A backend did what its contract does not allow. It is not known what the backend did with the call.

    If it raised an exception, the cause of this one is that exception. Otherwise the text says what it did.
    """

    @classmethod
    def returned(cls, backend: Backend, said: str, found: object, expected: str) -> BackendDefect:
        """A defect for a value of the wrong type. ``said`` begins a clause whose object is the value."""
        return cls(f"backend {backend.name!r}: {said} {found!r:.60}, and not {expected}")


def reason_of(error: BaseException, **who: object) -> Reason:
    """The reason that an exception stands for. An exception that is not Statelink's own becomes ``backend.defect``.

    Args:
        error: The exception.
        who: Parties that the reason names, where the exception does not name them itself. Empty ones are left out.
    """
    named = {key: str(value) for key, value in who.items() if value}
    if isinstance(error, StatelinkError):
        reason = error.reason
        return Reason(reason.code, reason.what, {**named, **reason.who}, reason.cause, reason.hint)
    if isinstance(error, BackendDefect):
        if error.__cause__ is None:
            return Reason("backend.defect", "a value of the wrong type came from a backend", named, str(error)[:500])
        error = error.__cause__
    return Reason(
        "backend.defect",
        f"{type(error).__name__} was raised where only Statelink's own errors are expected",
        named,
        str(error)[:500],
    )


class PeerInfo(NamedTuple):
    """A rank of the other side.

    Attributes:
        name: Its link name; its address while the link name is not known.
        rank: Its rank, once it has introduced itself.
        heard: When its last message came; ``None`` if none came.
    """

    name: str
    rank: int | None
    heard: float | None


def seconds_since(then: float, now: float) -> float:
    """How long ago something was, in whole milliseconds. It may have happened after ``now`` was read; that is 0."""
    return round(max(0.0, now - then), 3)


def with_standing(
    reason: Reason, stands: dict[str, str], peers: Sequence[PeerInfo], missing: str, now: float
) -> Reason:
    """The same reason with diagnostics.

    Args:
        reason: Why the room fails.
        stands: Diagnostics of the room and this side.
        peers: The ranks that take part in the room. If the reason names one of them, only that one is described.
        missing: What the room still waited for.
        now: The time.
    """
    named = [peer for peer in peers if peer.name == reason.who.get("peer")] or list(peers)[:MOST_NAMED_PEERS]
    ages = ["never" if peer.heard is None else f"{seconds_since(peer.heard, now):.1f} s ago" for peer in named]
    if len(named) > 1:
        names = [peer.name if peer.rank is None else f"rank {peer.rank}" for peer in named]
        ages = [" ".join(each) for each in zip(names, ages, strict=True)]
    standing = {
        **stands,
        "peer": ", ".join(peer.name for peer in named),
        "rank": ", ".join(str(peer.rank) for peer in named if peer.rank is not None),
        "missing": missing or "nothing",
        "heard": "; ".join(ages) or "never",
    }
    diagnostics = {key: value for key, value in standing.items() if value and key not in reason.who}
    return msgspec.structs.replace(reason, diagnostics=diagnostics)


def hooks_wait_for(hooks: Iterable[tuple[str, SendHook | ReceiveHook]]) -> str:
    """What the hooks of a room wait for, to be added to the cause of a passed deadline. Control thread.

    Args:
        hooks: Pairs of a name, which says peer and component, and a hook.
    """
    waits = []
    for name, hook in hooks:
        try:
            what = hook.waits()
        except BaseException as error:  # a third party's strategy: the room still fails because of its deadline
            what = f"what its hook cannot say: {type(error).__name__}: {error}"[:200]
        if what:
            waits.append(f"; {name} waits for {what}")
    return "".join(waits[:MAX_HOOKS]) + (f"; and {len(waits) - MAX_HOOKS} more" if len(waits) > MAX_HOOKS else "")
