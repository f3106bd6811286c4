"""Why nobody answers at an address, in a network namespace of its own whose routes say so."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import zmq

from statelink.wire import Dialling, Trouble

ROUTES = "ip link set lo up && ip route add unreachable 10.8.0.0/16 && ip route add prohibit 10.9.0.0/16"
"""There is no other route."""
DIAL = """
import json, sys, time, zmq
from statelink.wire import Dialling, Trouble
with zmq.Context() as context:
    context.linger = 0
    found = {}
    for address, wanted in json.loads(sys.argv[1]).items():
        socket = context.socket(zmq.DEALER)
        socket.reconnect_ivl, end = 50, time.monotonic() + 60
        dialling = Dialling(socket, address)
        socket.connect(address)
        while (trouble := dialling.trouble()).name != wanted and time.monotonic() < end:
            time.sleep(0.01)
        found[address] = trouble.name
        dialling.close()
        socket.close()
    print(json.dumps(found))
"""
EXPECTED = {
    "tcp://127.0.0.1:9": "REFUSED",
    "tcp://localhost:9": "REFUSED",
    "tcp://10.7.0.1:7000": "NO_ROUTE",
    "tcp://10.8.0.1:7000": "UNREACHABLE",
    "tcp://10.9.0.1:7000": "FORBIDDEN",
    "tcp://nowhere.invalid:7000": "UNKNOWN_HOST",
}


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_only_a_refused_connection_is_called_refused() -> None:
    asks = ["unshare", "--net", "sh", "-c", f'{ROUTES} && exec "$@"', "sh", sys.executable, "-c", DIAL]
    done = subprocess.run([*asks, json.dumps(EXPECTED)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == EXPECTED


def test_what_somebody_says_counts_more_than_that_he_is_connected() -> None:
    """Also if that is learnt later, and if the connection is made anew."""
    with zmq.Context() as context:
        context.linger, context.rcvtimeo = 0, 20_000
        liar = context.socket(zmq.ROUTER)
        address = f"tcp://127.0.0.1:{liar.bind_to_random_port('tcp://127.0.0.1')}"
        before = None
        for _ in range(2):
            socket = context.socket(zmq.DEALER)
            dialling = Dialling(socket, address, before)
            socket.connect(address)
            socket.send(b"")
            liar.send_multipart(liar.recv_multipart())
            socket.recv()
            if before is None:
                dialling.dropped("wire.sender")
            before = dialling.trouble()
            assert before is Trouble.NAME
            dialling.close()
            socket.close()
        liar.close()
