"""Checks, from two handshakes alone, whether the two links can work together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelink.errors import PeerError

if TYPE_CHECKING:
    from statelink.wire import Handshake

__all__ = ["can_receive", "can_send", "check_peer", "is_sibling"]

ROLES = ("prefill", "decode", "both")


def can_send(role: str) -> bool:
    """Whether a link of this role has rooms that send."""
    return role in ("prefill", "both")


def can_receive(role: str) -> bool:
    """Whether a link of this role has rooms that receive."""
    return role in ("decode", "both")


def is_sibling(ours: Handshake, theirs: Handshake) -> bool:
    """Whether a peer is taken for another rank of this link's own instance: it only asks for this rank's inventory."""
    if ours.role != theirs.role:
        return False
    return ours.role != "both" or ours.inventory.instance == theirs.inventory.instance


def check_peer(ours: Handshake, theirs: Handshake, *, sends: bool) -> None:
    """Refuse a peer if the two handshakes show that this link cannot work with it.

    Args:
        ours: This link's handshake.
        theirs: The peer's handshake.
        sends: Whether this link is prefill for the peer; otherwise it is decode.

    Raises:
        PeerError: Says what does not fit, and the values of both sides.
    """
    who = {"peer": theirs.link}
    low, high = max(ours.protocol[0], theirs.protocol[0]), min(ours.protocol[1], theirs.protocol[1])
    if low > high:
        older = ours if ours.protocol[1] < theirs.protocol[1] else theirs
        raise PeerError(
            "the two sides speak no protocol version in common",
            cause=_both(ours, theirs, *(f"{_range(side.protocol)} (core {side.version})" for side in (ours, theirs))),
            hint=f"upgrade statelink on {_called(older, theirs if older is ours else ours)}",
            code="peer.protocol",
            **who,
        )
    if ours.backend != theirs.backend:
        raise PeerError(
            "the two sides use different backends",
            cause=_both(ours, theirs, repr(ours.backend), repr(theirs.backend)),
            hint="configure one backend on both sides: 'auto' chooses on each machine by itself",
            code="peer.backend",
            **who,
        )
    if is_sibling(ours, theirs):
        return
    source, target = (ours, theirs) if sends else (theirs, ours)
    if theirs.role not in ROLES:
        raise PeerError("the role of a peer is unknown", cause=f"{theirs.role!r}", code="peer.role", **who)
    if not can_send(source.role) or not can_receive(target.role):
        needed = "receive" if sends else "send"
        raise PeerError(
            f"a peer cannot {needed}",
            cause=f"the role of {theirs.link} is {theirs.role!r}, and that of {ours.link} is {ours.role!r}",
            hint=f"give {theirs.link} the role {'decode' if sends else 'prefill'!r} or 'both'",
            code="peer.role",
            **who,
        )
    if ours.verify != theirs.verify:
        raise PeerError(
            "the two sides have different settings of 'verify'",
            cause=_both(ours, theirs, repr(ours.verify), repr(theirs.verify)),
            hint="configure the same on both sides",
            code="peer.verify",
            **who,
        )
    mine = {kind.name: kind for kind in ours.kinds}
    for kind in theirs.kinds:
        known = mine.get(kind.name, kind)
        if known != kind:
            raise PeerError(
                f"the two sides define state type {kind.name!r} differently",
                cause=_both(ours, theirs, str(known), str(kind)),
                hint="install the same version of the package that brings the type",
                code="peer.state_type",
                **who,
            )
    for name, strategy in theirs.strategies.items():
        known_strategy = ours.strategies.get(name, strategy)
        if known_strategy != strategy:
            raise PeerError(
                f"the two sides move component {name!r} with different strategies",
                cause=_both(ours, theirs, repr(known_strategy), repr(strategy)),
                hint="install the same plugins, and configure the same staging, on both sides",
                code="peer.strategy",
                **who,
            )


def _both(ours: Handshake, theirs: Handshake, our_value: str, their_value: str) -> str:
    """The value of each side, with the name of the side: either side may show the text. Decode comes first."""
    said = [f"{our_value} on {_called(ours, theirs)}", f"{their_value} on {_called(theirs, ours)}"]
    return ", ".join(reversed(said) if theirs.role == "decode" else said)


def _called(side: Handshake, other: Handshake) -> str:
    """What texts call a side: its role, or its link name where the roles do not tell the two apart."""
    return side.role if {side.role, other.role} == {"prefill", "decode"} else side.link


def _range(versions: tuple[int, int]) -> str:
    low, high = versions
    return f"protocol {low}" if low == high else f"protocols {low} to {high}"
