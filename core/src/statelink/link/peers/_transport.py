"""Which transport carries the bytes to a peer, and whether the engine's ``require`` allows it."""

from __future__ import annotations

import functools
import logging
import time
from typing import TYPE_CHECKING, Any

from statelink.backend import UNKNOWN, Transports
from statelink.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from statelink.backend import Backend

__all__ = ["check_transport", "known_transport", "transport_of"]

log = logging.getLogger("statelink.link")

LOOK = 0.01
"""Seconds between two calls that ask the backend for the transport."""
MAX_WORD = 256
"""Most characters of a transport's name that peers are told."""


@functools.cache
def _tells(backend: type[Backend]) -> bool:
    """Whether backends of a class tell their transport. Kept, since a check against a protocol takes long."""
    return issubclass(backend, Transports)


def transport_of(backend: Backend, peer: str) -> str:
    """The transport that carries the bytes to a peer; `UNKNOWN` where the backend cannot say. Any thread."""
    if not _tells(type(backend)):
        return UNKNOWN
    telling: Any = backend
    try:
        return str(telling.transport(peer) or UNKNOWN)[:MAX_WORD]
    except BaseException:
        log.exception("backend %s failed to tell its transport", backend.name)
        return UNKNOWN


def _allows(require: Collection[str], transport: str) -> bool:
    """Whether ``require`` allows a transport. Where several carry the bytes, joined by ``+``, each must be allowed."""
    return not require or (bool(transport) and set(transport.split("+")) <= set(require) - {UNKNOWN})


def known_transport(require: Collection[str], ask: Callable[[], str], patience: float) -> str:
    """The transport that carries the bytes, once the backend can say it. Blocks; data threads only.

    Args:
        require: The transports that are allowed. If it is empty, any is, and this does not wait.
        ask: Returns the transport, or `UNKNOWN` while the backend cannot say it.
        patience: Seconds to wait at most.
    """
    until = time.monotonic() + patience
    while (found := ask()) == UNKNOWN and require and time.monotonic() < until:
        time.sleep(LOOK)
    return found


def check_transport(require: Collection[str], transport: str, backend: str, peer: str) -> None:
    """Refuse a peer if its transport is not allowed, or is not known.

    Raises:
        PeerError: Names the required transports and the peer's.
    """
    if not require or _allows(require, transport):
        return
    hint = "see the backend's options for the transports that it may use"
    if transport in ("", UNKNOWN):
        hint = "set 'require' on prefill, too: its backend then finds out when it connects"
    raise PeerError(
        "the required transport does not carry the bytes to a peer",
        cause=f"{' or '.join(sorted(require))} is required, and the transport is {transport or UNKNOWN}",
        hint=hint,
        code="peer.transport",
        backend=backend,
        peer=peer,
    )
