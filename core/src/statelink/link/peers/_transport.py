"""Which transport carries the bytes to a peer, and whether the engine's ``require`` allows it."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from statelink._logs import logger
from statelink.backend import UNKNOWN, Transports
from statelink.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from statelink.backend import Backend

__all__ = ["Carrier", "check_transport", "known_transport", "tells_transport", "transport_of"]

log = logger("statelink.link")

TRANSPORT_SECONDS = 0.01
"""Seconds between two calls that ask the backend for the transport."""
MAX_WORD = 256
"""Most characters of a transport's name that peers are told."""


class Carrier(NamedTuple):
    """What a backend says of the transport to a peer.

    Attributes:
        transport: The transport that carries the bytes; `UNKNOWN` where the backend cannot say.
        defect: What is wrong with the backend's answer, as a clause; empty for nothing.
    """

    transport: str
    defect: str = ""


@functools.cache
def tells_transport(backend: type[Backend]) -> bool:
    """Whether backends of a class tell their transport. Kept, since a check against a protocol takes long."""
    return issubclass(backend, Transports)


def transport_of(backend: Backend, peer: str) -> Carrier:
    """The transport that carries the bytes to a peer. Any thread."""
    if not tells_transport(type(backend)):
        return Carrier(UNKNOWN)
    telling: Any = backend
    try:
        found: object = telling.transport(peer)
    except BaseException as error:
        log.exception("backend %s failed to tell its transport", backend.name)
        return Carrier(UNKNOWN, f"the backend's `transport` raised {type(error).__name__}: {error}")
    if not isinstance(found, str):
        log.error("backend %s returned %.60r as its transport, and not a str", backend.name, found)
        return Carrier(UNKNOWN, f"the backend's `transport` returned {found!r:.60}, and not a str")
    return Carrier(found[:MAX_WORD] or UNKNOWN)


def _allows(require: Collection[str], transport: str) -> bool:
    """Whether ``require`` allows a transport. Where several carry the bytes, joined by ``+``, each must be allowed."""
    return not require or (bool(transport) and set(transport.split("+")) <= set(require) - {UNKNOWN})


def known_transport(require: Collection[str], ask: Callable[[], Carrier], patience: float) -> Carrier:
    """The transport that carries the bytes, once the backend can say it. Blocks; data threads only.

    Args:
        require: The transports that are allowed. If it is empty, any is, and this does not wait.
        ask: Returns what the backend says, with `UNKNOWN` while it cannot say the transport. After a defect, it is not
            asked again.
        patience: Seconds to wait at most.
    """
    until = time.monotonic() + patience
    while (found := ask()) == Carrier(UNKNOWN) and require and time.monotonic() < until:
        time.sleep(TRANSPORT_SECONDS)
    return found


def check_transport(require: Collection[str], carrier: Carrier, backend: str, peer: str) -> None:
    """Refuse a peer if its transport is not allowed, or is not known.

    Raises:
        PeerError: Names the required transports and the peer's.
    """
    transport, defect = carrier
    if not require or _allows(require, transport):
        return
    hint = "see the backend's options for the transports that it may use"
    if defect:
        hint = f"tell the author of the package; `statelink conform {backend} -k Connecting` tests it"
    elif transport in ("", UNKNOWN):
        hint = "set 'require' on prefill, too: its backend then finds out when it connects"
    raise PeerError(
        "the required transport does not carry the bytes to a peer",
        cause=f"{' or '.join(sorted(require))} is required, and "
        + (defect or f"the transport is {transport or UNKNOWN}"),
        hint=hint,
        code="peer.transport",
        backend=backend,
        peer=peer,
    )
