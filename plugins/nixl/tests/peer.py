"""Processes with this backend, whose memory the tests can see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.helpers import backend_peer
from tests.helpers.backend_peer import Memory, finish, move

from statelink_nixl import NixlBackend

if TYPE_CHECKING:
    from statelink.backend import Backend

__all__ = ["Memory", "NixlBackend", "Peer", "finish", "make", "move"]


def make(link: str, options: dict[str, Any] | None = None) -> Backend:
    """A backend of this process."""
    return backend_peer.make(NixlBackend, link, options)


class Peer(backend_peer.Peer):
    """Another process with one."""

    backend = NixlBackend
