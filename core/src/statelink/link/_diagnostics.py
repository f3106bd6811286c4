"""How a room stood when it failed: which peers it has to do with, and what it waited for. Every reason says it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from statelink.backend import ReceiveHook, SendHook
    from statelink.errors import Reason

__all__ = ["PeerInfo", "hooks_wait_for", "with_standing"]

MAX_PEERS = 8
"""Most peers that a reason names."""
MAX_HOOKS = 4
"""Most hooks that a reason names."""


class PeerInfo(NamedTuple):
    """A rank of the other side.

    Attributes:
        name: Its link name; its address while that is not known.
        rank: Its rank, once it introduced itself.
        heard: When it was last heard, if it ever was.
    """

    name: str
    rank: int | None
    heard: float | None


def with_standing(
    reason: Reason, stands: dict[str, str], peers: Sequence[PeerInfo], missing: str, now: float
) -> Reason:
    """The same reason, with how the room stood when it arose.

    Args:
        reason: Why the room fails.
        stands: What is known of the room and this side.
        peers: The ranks that the room has to do with.
        missing: What it still waited for.
        now: The time.
    """
    named = [peer for peer in peers if peer.name == reason.who.get("peer")] or list(peers)[:MAX_PEERS]
    ages = ["never" if peer.heard is None else f"{max(0.0, now - peer.heard):.1f} s ago" for peer in named]
    if len(named) > 1:
        whom = [peer.name if peer.rank is None else f"rank {peer.rank}" for peer in named]
        ages = [" ".join(each) for each in zip(whom, ages, strict=True)]
    standing = {
        **stands,
        "peer": ", ".join(peer.name for peer in named),
        "rank": ", ".join(str(peer.rank) for peer in named if peer.rank is not None),
        "missing": missing or "nothing",
        "heard": "; ".join(ages) or "never",
    }
    told = {key: value for key, value in standing.items() if value and key not in reason.who}
    return msgspec.structs.replace(reason, diagnostics=told)


def hooks_wait_for(hooks: Iterable[tuple[str, SendHook | ReceiveHook]]) -> str:
    """What the hooks of a room wait for, as an addition to why it passed its deadline.

    Args:
        hooks: Under the names of their peer and component.
    """
    said = []
    for name, hook in hooks:
        try:
            what = hook.waits()
        except BaseException as error:  # somebody else's strategy: the room fails for the reason that is there
            what = f"what its hook cannot say: {type(error).__name__}: {error}"[:200]
        if what:
            said.append(f"; {name} waits for {what}")
    return "".join(said[:MAX_HOOKS]) + (f"; and {len(said) - MAX_HOOKS} more" if len(said) > MAX_HOOKS else "")
