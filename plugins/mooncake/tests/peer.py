"""Processes with this backend, whose memory the tests can see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.helpers import backend_peer
from tests.helpers.backend_peer import Memory, move

from statelink_mooncake import MooncakeBackend

if TYPE_CHECKING:
    from statelink.backend import Backend

__all__ = ["Memory", "MooncakeBackend", "Peer", "make", "move"]


def make(link: str, options: dict[str, Any] | None = None) -> Backend:
    """A backend of this process."""
    return backend_peer.make(MooncakeBackend, link, options)


class Peer(backend_peer.Peer):
    """Another process with one."""

    backend = MooncakeBackend

    def complaints(self) -> list[str]:
        """Let it end by itself: what it printed, but for the banner that comes before the first error."""
        status, said = self.end()
        assert status == 0
        banner = "WARNING: Logging before InitGoogleLogging()"
        return [line for line in said.splitlines() if banner not in line]
