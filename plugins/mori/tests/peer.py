"""This backend, here and in processes whose memory the tests can see."""

from __future__ import annotations

from functools import partial

from tests.helpers import backend_peer

from statelink_mori import MoriBackend

make = partial(backend_peer.make, MoriBackend)


class Peer(backend_peer.Peer):
    backend = MoriBackend
