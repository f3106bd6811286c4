"""Whether two links can work together, as far as their cards tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelink.backend import Op
from statelink.errors import PeerError

if TYPE_CHECKING:
    from statelink.wire import Handshake

__all__ = ["check_card"]


def check_card(ours: Handshake, theirs: Handshake) -> None:
    """Refuse a peer whose card does not go with ours.

    Raises:
        PeerError: Says which field, and both values.
    """
    who = {"peer": theirs.link}
    low, high = max(ours.protocol[0], theirs.protocol[0]), min(ours.protocol[1], theirs.protocol[1])
    if low > high:
        older = "this side" if ours.protocol[1] < theirs.protocol[1] else "the peer"
        raise PeerError(
            "the two sides speak no protocol version in common",
            cause=f"{_range(ours.protocol)} here (core {ours.version}), "
            f"{_range(theirs.protocol)} there (core {theirs.version})",
            hint=f"upgrade statelink on {older}",
            code="peer.protocol",
            **who,
        )
    if ours.backend != theirs.backend:
        raise PeerError(
            "the two sides use different backends",
            cause=f"{ours.backend!r} here, {theirs.backend!r} there",
            hint="configure one backend on both sides: 'auto' chooses on each machine by itself",
            code="peer.backend",
            **who,
        )
    if ours.role == theirs.role:
        return  # a sibling asks what we hold
    if not {ours.role, theirs.role} == {"prefill", "decode"}:
        raise PeerError("a peer has no known role", cause=f"{theirs.role!r}", code="peer.role", **who)
    source = ours if ours.role == "prefill" else theirs
    if Op.WRITE.value not in source.ops:
        raise PeerError(
            "prefill cannot push",
            cause=f"its backend {source.backend!r} offers {', '.join(source.ops) or 'nothing'}",
            hint="choose a backend that offers 'write'",
            code="peer.direction",
            **who,
        )
    if ours.verify != theirs.verify:
        raise PeerError(
            "the two sides do not verify alike",
            cause=f"verify is {ours.verify!r} here, {theirs.verify!r} there",
            hint="configure the same on both sides",
            code="peer.verify",
            **who,
        )
    mine = {kind.name: kind for kind in ours.kinds}
    for kind in theirs.kinds:
        known = mine.get(kind.name)
        if known is not None and known != kind:
            raise PeerError(
                f"the two sides define state type {kind.name!r} differently",
                cause=f"{known} here, {kind} there",
                hint="install the same version of the package that brings the type",
                code="peer.state_type",
                **who,
            )
    for name, strategy in theirs.strategies.items():
        known_strategy = ours.strategies.get(name, strategy)
        if known_strategy != strategy:
            raise PeerError(
                f"the two sides carry component {name!r} by different strategies",
                cause=f"{known_strategy!r} here, {strategy!r} there",
                hint="install the same plugins, and configure the same staging, on both sides",
                code="peer.strategy",
                **who,
            )


def _range(versions: tuple[int, int]) -> str:
    low, high = versions
    return f"protocol {low}" if low == high else f"protocols {low} to {high}"
