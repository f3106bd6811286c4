"""Reads and checks peers' handshakes, and keeps those that come while the link is suspended.

Small ones are read at once, on the control thread, and large ones on a data thread. The checks say, from two handshakes
alone, whether the two links can work together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from statelink._logs import logger
from statelink.errors import PeerError, WireError
from statelink.link._reasons import reason_of
from statelink.wire import MAX_EFFORT, MAX_HANDSHAKE, read_handshake

if TYPE_CHECKING:
    from statelink.errors import Reason
    from statelink.link.runtime import Workers
    from statelink.wire import Channel, Handshake, Hello

__all__ = ["MAX_WAITING", "HandshakeReader", "HeldHellos", "can_receive", "can_send", "check_peer", "is_sibling"]

ROLES = ("prefill", "decode", "both")

log = logger("statelink.link")

SMALL_HANDSHAKE, SMALL_EFFORT = 16 << 10, 1 << 12
"""The most bytes, and the most effort, of a handshake that the control thread reads: milliseconds of work at most."""
MAX_WAITING = 4 * MAX_HANDSHAKE
"""Most bytes of handshakes that wait to be read, and of those that wait until a suspended link is resumed."""

Made = TypeVar("Made")


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


class HandshakeReader:
    """Reads and checks handshakes. Belongs to the control thread; none of its methods blocks.

    Args:
        channel: Counts the handshakes that are dropped.
        workers: Read the large ones.
    """

    def __init__(self, channel: Channel, workers: Workers) -> None:
        self._channel = channel
        self._workers = workers
        self._reading: set[str] = set()
        """Peers of which a large handshake is queued or being read."""
        self._waiting = 0
        """Bytes of these handshakes."""

    def read(
        self,
        peer: str,
        raw: msgspec.Raw,
        check: Callable[[Handshake], Made],
        then: Callable[[Made | None, Reason | None], None],
    ) -> None:
        """Read a handshake and check it. A large one is read on a data thread, one of each peer at a time.

        A large handshake that comes while an earlier one of the same peer is being read is dropped: a peer that gets no
        answer repeats its handshake. One that comes while too many bytes wait is dropped and counted.

        Args:
            peer: The peer's link name or address.
            raw: The handshake.
            check: Called on the thread that reads, which may be a data thread. Raises if the handshake is refused;
                otherwise returns what ``then`` needs.
            then: Called on the control thread with what ``check`` returned, or with why the handshake is refused.
        """
        nbytes = len(memoryview(raw))
        if nbytes <= SMALL_HANDSHAKE:
            read, reason = _read(raw, check, SMALL_EFFORT)
            if reason is None or reason.code != "wire.effort":
                then(read, reason)
                return
        if peer in self._reading:
            return
        if self._waiting + nbytes > MAX_WAITING:
            cause = f"{self._waiting} bytes of others wait to be read"
            what = "a handshake came while too many others wait"
            self._channel.count(WireError(what, cause=cause, code="wire.busy"))
            return
        self._reading.add(peer)
        self._waiting += nbytes

        # Runs on the control thread.
        def done(read: tuple[Made | None, Reason | None] | None, defect: Reason | None) -> None:
            self._reading.discard(peer)
            self._waiting -= nbytes
            made, reason = read if read is not None else (None, defect)
            then(made, reason)

        self._workers.run(self._workers.readers, "read", lambda: _read(raw, check, MAX_EFFORT), done)


def _read(raw: msgspec.Raw, check: Callable[[Handshake], Made], effort: int) -> tuple[Made | None, Reason | None]:
    try:
        return check(read_handshake(raw, effort)), None
    except BaseException as error:  # the peer sent it: no content may do more than get it refused
        return None, reason_of(error)


class HeldHellos:
    """The latest `Hello` of each peer. Belongs to the control thread; none of its methods blocks.

    Args:
        most: Most peers.
        most_bytes: Most bytes of their handshakes together.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._held: dict[str, Hello] = {}
        self._nbytes = 0

    def add(self, hello: Hello) -> None:
        """Keep a handshake, instead of an earlier one of its sender.

        Raises:
            WireError: Too many others are kept (``wire.busy``). A peer that gets no answer repeats its handshake.
        """
        earlier = self._held.pop(hello.sender, None)
        if earlier is not None:
            self._nbytes -= _length(earlier)
        if len(self._held) >= self._most or self._nbytes + _length(hello) > self._most_bytes:
            raise WireError(
                "a handshake came while too many others wait",
                cause=f"{self._nbytes} bytes of {len(self._held)} others wait until this link is resumed",
                code="wire.busy",
            )
        # A copy, because the handshake is a view of the whole message, which may be larger.
        self._held[hello.sender] = msgspec.structs.replace(hello, handshake=hello.handshake.copy())
        self._nbytes += _length(hello)

    @property
    def all(self) -> Iterable[Hello]:
        """Every one that is kept."""
        return self._held.values()


def _length(hello: Hello) -> int:
    return len(memoryview(hello.handshake))
