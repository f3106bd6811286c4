"""One process a rank, several ranks a side, over every backend; each decode rank checks its own slice of the state."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.topology.rank import ROOMS
from tests.topology.world import TOPOLOGIES

ROOT = Path(__file__).parents[2]


class Process:
    """A rank."""

    def __init__(self, role: str, number: int, backend: str) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in end()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.topology.rank", role, str(number), backend],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def say(self, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(10)
            self.errors.seek(0)
            pytest.fail(f"a rank ended: {self.errors.read()[-3000:]}")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def ranks(backend: str) -> Iterator[dict[str, list[Process]]]:
    most = {
        "prefill": max(topology.prefill.ranks for topology in TOPOLOGIES),
        "decode": max(topology.decode.ranks for topology in TOPOLOGIES),
    }
    started = {role: [Process(role, n, backend) for n in range(count)] for role, count in most.items()}
    yield started
    for process in (*started["prefill"], *started["decode"]):
        process.end()


def free_ports(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return found


def test_every_decode_rank_gets_its_slice(ranks: dict[str, list[Process]]) -> None:
    for topology in TOPOLOGIES:
        prefill, decode = ranks["prefill"][: topology.prefill.ranks], ranks["decode"][: topology.decode.ranks]
        for process in prefill:
            port = {str(room): "tcp://127.0.0.1:0" for room in ROOMS}
            process.say(listen=port, siblings={str(room): [] for room in ROOMS})
        own = {room: free_ports(len(decode)) for room in ROOMS}
        for n, process in enumerate(decode):
            siblings = {str(room): [a for m, a in enumerate(own[room]) if m != n] for room in ROOMS}
            process.say(listen={str(room): own[room][n] for room in ROOMS}, siblings=siblings)
        for room in ROOMS:
            addresses = [process.hear()["address"] for process in prefill]
            for process in decode:
                assert process.hear()["address"]
            for process in decode:
                process.say(peers=addresses)
            for process in decode:
                assert process.hear() == {"room": room, "wrong": 0, "quiesced": True}, topology.name
            assert all(process.hear()["moved"] > 0 for process in prefill), topology.name
