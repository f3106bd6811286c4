"""One process a rank, several ranks a side, over every backend; each decode rank checks its own slice of the state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from tests.helpers.processes import Process
from tests.topology.rank import ROOMS
from tests.topology.world import TOPOLOGIES, Topology

from statelink.testing import free_addresses


@pytest.fixture
def topologies(backend: str) -> Sequence[Topology]:
    """All over tcp. Over the others the conformance kit has TP 2 to 1 and 1 to 2 already, state type by state type."""
    return TOPOLOGIES if backend == "tcp" else [each for each in TOPOLOGIES if each.prefill.ranks > 2]


@pytest.fixture
def ranks(backend: str, topologies: Sequence[Topology]) -> Iterator[dict[str, list[Process]]]:
    most = {
        "prefill": max(topology.prefill.ranks for topology in topologies),
        "decode": max(topology.decode.ranks for topology in topologies),
    }
    names = [topology.name for topology in topologies]
    started = {
        role: [Process("tests.topology.rank", role, n, backend, *names) for n in range(count)]
        for role, count in most.items()
    }
    yield started
    for process in (*started["prefill"], *started["decode"]):
        process.end()


def test_every_decode_rank_gets_its_slice(ranks: dict[str, list[Process]], topologies: Sequence[Topology]) -> None:
    for topology in topologies:
        prefill, decode = ranks["prefill"][: topology.prefill.ranks], ranks["decode"][: topology.decode.ranks]
        for process in prefill:
            port = {str(room): "tcp://127.0.0.1:0" for room in ROOMS}
            process.say(listen=port, siblings={str(room): [] for room in ROOMS})
        own = {room: free_addresses(len(decode)) for room in ROOMS}
        for n, process in enumerate(decode):
            siblings = {str(room): [a for m, a in enumerate(own[room]) if m != n] for room in ROOMS}
            process.say(listen={str(room): own[room][n] for room in ROOMS}, siblings=siblings)
        for room in ROOMS:
            peers = [process.hear()["address"] for process in prefill]
            for process in decode:
                assert process.hear()["address"]
            for process in decode:
                process.say(peers=peers)
            for process in decode:
                assert process.hear() == {"room": room, "wrong": 0, "quiesced": True}, topology.name
            assert all(process.hear()["moved"] > 0 for process in prefill), topology.name
