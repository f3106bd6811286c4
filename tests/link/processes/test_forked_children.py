"""A child that an engine forks does not keep the engine's ports, and does not hide that the engine has ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.helpers.links import Rank, hand_over

from statelink.link import sockets
from statelink.testing import free_addresses

ENGINE = """
import json, os, sys, threading
from tests.helpers.links import Rank, hand_over

with Rank("p", 1).open(json.loads(sys.argv[1])) as prefill:
    child = os.fork()
    if child:
        print(child, flush=True)
    threading.Event().wait()
"""


class Engine(NamedTuple):
    """An engine with a link, and the child that it has forked."""

    process: subprocess.Popen[str]
    child: int


@pytest.fixture
def config() -> dict[str, Any]:
    control, data, metrics = free_addresses(3)
    return {
        "role": "prefill",
        "backend": "tcp",
        "listen": control,
        "options": {"port": port(data)},
        "telemetry": {"prometheus": {"port": port(metrics)}},
        "inspect": True,
        "heartbeat": 0.25,
        "liveness": 2.0,
    }


def listening() -> list[str]:
    """The addresses of TCP sockets on which this process listens, as the kernel writes them."""
    mine = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder that is being listed
            mine.add(os.readlink(f"/proc/self/fd/{number}"))
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


@contextlib.contextmanager
def engine(config: dict[str, Any]) -> Iterator[Engine]:
    command = [sys.executable, "-c", ENGINE, json.dumps(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            made = Engine(process, int(process.stdout.readline()))
            try:
                yield made
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(made.child, signal.SIGKILL)
        finally:
            process.kill()


def test_an_engine_is_started_again_at_its_ports_while_its_child_lives(config: dict[str, Any]) -> None:
    pytest.importorskip("prometheus_client")
    with engine(config) as first:
        source, target = Rank("p", 1), Rank("d")
        first.process.kill()
        first.process.wait()
        assert os.path.exists(f"/proc/{first.child}")
        with source.open(config) as prefill, target.open({"role": "decode", "backend": "tcp"}) as decode:
            assert prefill.address == config["listen"]
            hand_over(prefill, decode, source, target)


def test_the_link_of_an_engine_goes_on_after_a_fork() -> None:
    """The child closes its copies of the sockets, and tells what it has left; the parent's are as they were."""
    source, target = Rank("p", 1), Rank("d")
    config = {"role": "prefill", "backend": "tcp"}
    with source.open(config) as prefill, target.open(config, role="decode") as decode:
        hand_over(prefill, decode, source, target)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, b"\n".join(each.encode() for each in listening()) + b".")
            os._exit(0)
        os.close(writing)
        with open(reading) as told:
            assert told.read() == "."
        os.waitpid(child, 0)
        assert len(listening()) >= 4
        target.arrays[:] = 0
        hand_over(prefill, decode, source, target, 2)


def test_the_socket_for_inspection_is_gone_with_the_engine(config: dict[str, Any]) -> None:
    with engine({**config, "telemetry": {}}) as first:
        assert [path for path in sockets() if path.name.startswith(f"{first.process.pid}-")]
        first.process.kill()
        first.process.wait()
        assert not [path for path in sockets() if path.name.startswith(f"{first.process.pid}-")]
