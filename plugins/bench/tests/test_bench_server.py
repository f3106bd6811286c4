"""What a peer may tell the server of a benchmark, and what it gets for anything else. Speaks ZeroMQ by hand."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq
from tests.helpers.peers import until

PROGRAM = [sys.executable, "-c", "import sys; sys.argv[0] = 'statelink'; from statelink.cli import main; main()"]
MIB = 1 << 20
PATIENCE = 60_000
"""Milliseconds for an answer. A side that starts imports numpy."""


class Served:
    """``statelink bench --serve`` in a process of its own, and a peer of it."""

    def __init__(self, *arguments: str) -> None:
        command = [*PROGRAM, "bench", "--serve", "tcp://127.0.0.1:0", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self._context: zmq.Context[Any] = zmq.Context()

    def socket(self) -> zmq.Socket[Any]:
        made: zmq.Socket[Any] = self._context.socket(zmq.REQ)
        made.linger = 0
        made.connect(self.address)
        return made

    def says(self, *frames: bytes) -> dict[str, Any]:
        with self.socket() as asking:
            asking.send_multipart(list(frames))
            return answer(asking)

    def tell(self, do: str, session: str = "s", **told: Any) -> dict[str, Any]:
        return self.says(json.dumps({"session": session, "do": do, **told}).encode())

    def open(self, **told: Any) -> dict[str, Any]:
        common: dict[str, Any] = {"block": 64, "count": 16, "memory": ["dram", ""], "backend": "tcp", "options": {}}
        return self.tell("open", **{**common, **told})

    def resident(self) -> int:
        """The most bytes of memory that its processes had."""
        (children,) = (
            Path(each).read_text() for each in [f"/proc/{self.process.pid}/task/{self.process.pid}/children"]
        )
        texts = [Path(f"/proc/{pid}/status").read_text() for pid in (self.process.pid, *children.split())]
        return sum(int(text.partition("VmHWM:")[2].split()[0]) * 1024 for text in texts)

    def end(self) -> None:
        assert self.process.poll() is None, "it has ended"
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._context.destroy(linger=0)


def answer(asking: zmq.Socket[Any]) -> dict[str, Any]:
    assert asking.poll(PATIENCE), "it does not answer"
    found: dict[str, Any] = json.loads(asking.recv())
    return found


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[Served]:
    made = Served(*arguments)
    try:
        yield made
        made.end()
    finally:
        made.close()


def test_what_is_no_message_is_refused_and_ends_nothing() -> None:
    hello = b'{"session": "a", "do": "hello"}'
    with served() as server:
        for frames, why in (
            ([hello, hello], "3 frames"),
            ([b'{"session": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"], "nested too deeply"),
            ([b'{"do": "open", "options": {"a": ' + b"[" * 300 + b"]" * 300 + b"}}"], "$.options"),
            ([b'{"do": "hello", "session": ' + b"[" * 300 + b"]" * 300 + b"}"], "$.session"),
            ([b""], "truncated"),
            ([b"\xff"], "malformed"),
            ([b'{"do": "receive"}'], "receive"),
            ([b'{"do": "send", "first": 1, "rooms": 0, "pages": 1, "scattered": true, "lasts": 1}'], "$.rooms"),
            ([b'{"do": "send", "first": 1, "rooms": 1, "pages": -1, "scattered": true, "lasts": 1}'], "$.pages"),
        ):
            said = server.says(*frames)["error"]
            assert said.startswith("no message of a benchmark: ")
            assert why in said
            assert server.says(hello) == {}


def test_what_a_peer_may_allocate_is_bounded() -> None:
    """Pages of one byte would take eight bytes each in every list of their numbers."""
    with served("--most", "16m") as server:
        assert "$.count" in server.open(block=1, count=16 * MIB)["error"]
        assert server.open(block=64, count=(1 << 18) + 1)["error"].endswith("at `$.count`")
        assert server.open(block=65, count=1 << 18)["error"] == "it would need 17039360 bytes"
        assert "address" in server.open(block=64, count=1 << 18)
        send: dict[str, Any] = {"first": 1, "pages": 1 << 18, "scattered": True, "lasts": 60.0}
        assert "at most 4194304 blocks at once" in server.tell("send", rooms=17, **send)["error"]
        assert server.tell("send", rooms=16, **send) == {}
        again = server.tell("send", rooms=16, **{**send, "first": 100})
        assert again["error"] == "requests that were sent before have not been settled"
        assert server.resident() < 18 * MIB + 350 * MIB
        assert server.tell("end") == {}


def test_others_are_answered_while_one_waits() -> None:
    with served() as server, server.socket() as waits:
        assert "address" in server.open()
        send: dict[str, Any] = {"first": 1, "rooms": 1, "pages": 1, "scattered": True, "lasts": 3600.0}
        assert server.tell("send", **send) == {}
        waits.send(b'{"session": "s", "do": "settle"}')  # nobody receives these
        until(lambda: "still told to say whether" in server.tell("send", **send).get("error", ""))
        assert server.tell("hello", "other")["error"] == "another benchmark runs"
        assert not waits.poll(0)
        assert server.tell("end") == {}
        assert server.tell("hello", "other") == {}


def test_a_peer_does_not_choose_a_function_that_runs_here(tmp_path: Path) -> None:
    made = tmp_path / "made"
    with served() as server:
        said = server.open(memory=[str(made), "os:mkdir"])["error"]
        assert "cannot allocate memory of kind" in said
        assert "mkdir" not in said
        assert not made.exists()
    with served("--allocator", "os:mkdir") as server:
        server.open(memory=[str(made), "os:rmdir"])
        assert made.exists(), "the function of the server's own host"
