"""This backend, here and in processes whose memory the tests can see."""

from __future__ import annotations

from functools import partial

from tests.helpers import backend_peer

from statelink_mooncake import MooncakeBackend

make = partial(backend_peer.make, MooncakeBackend)


class Peer(backend_peer.Peer):
    backend = MooncakeBackend

    def complaints(self) -> list[str]:
        """Let it end by itself: what it printed, but for the banner that comes before the first error."""
        status, said = self.end()
        assert status == 0
        banner = "WARNING: Logging before InitGoogleLogging()"
        return [line for line in said.splitlines() if banner not in line]
