"""NIXL's threads, which share large batches: what they keep of peers that died."""

from __future__ import annotations

import gc
import importlib.util
import os
import time
from typing import Any

import pytest
from tests.helpers.backend_peer import MIB, Memory, Peer, make, move, scattered

from statelink_nixl import NixlBackend

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NIXL is not installed: pip install nixl"
)

LAYOUT = ((8 * MIB,),)
BLOCKS = 4096
PEERS = 3


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def files_at_rest() -> int:
    """Files of this process, once those of earlier tests are closed: libraries close some of theirs later."""
    gc.collect()
    seen = [files()]
    until = time.monotonic() + 30
    while len(seen) < 5 or len(set(seen[-5:])) > 1:
        assert time.monotonic() < until, f"the number of files does not come to rest: {seen[-5:]}"
        time.sleep(0.2)
        seen.append(files())
    return seen[-1]


def left(options: dict[str, Any], least: int) -> int:
    """Files that a backend keeps of peers that got a large batch each, and died.

    Args:
        options: The backend's options.
        least: How many files of the peers are known to stay. It is waited until no more are there.
    """
    backend, memory = make(NixlBackend, "here", options), Memory(LAYOUT)
    backend.register(memory.regions)
    peers = [Peer(NixlBackend, f"peer{number}", LAYOUT, options) for number in range(PEERS)]
    try:
        before = files_at_rest()
        for peer in peers:
            peer.ready()
            backend.connect(peer.link, peer.descriptor, peer.regions)
            many = scattered(memory.regions, peer.regions, BLOCKS, 512, 0)
            assert all(each.outcome == (True, "", True) for each in move(backend, peer.link, many))
        assert files() >= before + PEERS
        for peer in peers:
            peer.kill()
            backend.disconnect(peer.link)
        until = time.monotonic() + 5
        while files() > before + least and time.monotonic() < until:
            backend.poll([])
            time.sleep(0.05)
        return files() - before
    finally:
        backend.close()
        for peer in peers:
            peer.kill()


@pytest.mark.parametrize("ucx", [{}, {"TLS": "tcp"}], ids=["copies", "tcp"])
def test_threads_keep_no_files_of_peers_that_died(ucx: dict[str, str]) -> None:
    """Beside what NIXL keeps of each peer without them."""
    without = left({"ucx": ucx, "num_threads": 0}, 0)
    assert left({"ucx": ucx, "num_threads": 2}, without) <= without + 2
