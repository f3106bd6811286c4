"""An instance has more addresses than this process can have connections, or as many as it can."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("no_configuration")

PROCESS = """
import os, resource, socket, sys
import numpy as np
import statelink
from statelink import state

ranks, limit = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
listening = socket.create_server(("0.0.0.0", 0), backlog=4096)  # all of 127.0.0.0/8 leads here
port = listening.getsockname()[1]
addresses = [f"tcp://127.0.{number >> 8}.{number & 255}:{port}" for number in range(256, 256 + ranks)]
pages = np.zeros((2, 4, 4, 1, 8), np.uint8)
inventory = state.describe("d", [state.kv_pages({0: pages}, heads=1)])
config = {"role": "decode", "backend": "tcp", "inspect": False, "liveness": 600.0, "peers": {"p": addresses}}
link = statelink.open(config, inventory)
room = link.receive(1, "p", 4, {"kv": [0]}, deadline=100.0)
if limit < 4 * ranks:
    room.wait(60.0)
    print(room.reason.coded)
    listening.setblocking(False)
    try:
        listening.accept()
    except BlockingIOError:
        print("nobody was dialled")
else:
    listening.settimeout(60.0)
    accepted = [listening.accept() for _ in range(ranks)]
    print(len({peer.getsockname()[0] for peer, _ in accepted}), "were dialled")
    room.abort()
    for peer, _ in accepted:
        peer.close()
link.close()
"""


def run(ranks: int, limit: int) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROCESS, str(ranks), str(limit)],
        timeout=200,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_instance_that_would_take_all_files_is_refused_before_anybody_is_dialled() -> None:
    """A rendezvous may answer with 4,096 addresses, and ZeroMQ ends the process where it cannot open its own files."""
    said = run(4096, 1024)
    assert "there are too few file descriptors to dial 4096 addresses" in said
    assert "16432 must be free; the process may have 1024" in said
    assert said.startswith("config.descriptors: ")
    assert "nobody was dialled" in said


def test_the_files_of_the_process_are_the_only_limit() -> None:
    """Not a number of sockets that nobody can configure."""
    assert run(400, 4096) == "400 were dialled\n"
