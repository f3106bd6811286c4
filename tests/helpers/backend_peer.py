"""A process with one backend, driven over its standard input, whose memory the tests can see.

Run as a module, it is the other process: ``python -m tests.helpers.backend_peer <settings as JSON>``. It prints one
line of JSON for each that it is given. Its regions lie in files that it shares with whoever started it, so that a test
looks at bytes without asking the backend about them.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from statelink.backend import Backend, BackendContext, Batch, Blocks, Op, Region, Transfer

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Memory", "Peer", "finish", "make", "move"]

DEADLINE = 30.0


class Memory:
    """Regions in shared files: one file for each list of sizes, whose regions lie side by side."""

    def __init__(self, folder: Path, layout: Sequence[Sequence[int]], kind: str = "dram") -> None:
        self.arrays: list[npt.NDArray[np.uint8]] = []
        for number, sizes in enumerate(layout):
            path = folder / f"memory{number}"
            if not path.exists():
                with path.open("wb") as file:
                    file.truncate(sum(sizes))
            whole = np.memmap(path, np.uint8, "r+")
            self.arrays += np.split(whole, np.cumsum(sizes)[:-1])
        self.regions = tuple(Region(array.ctypes.data, len(array), kind) for array in self.arrays)


def make(backend: type[Backend], link: str, options: dict[str, Any] | None = None) -> Backend:
    """A backend of its own."""
    return backend(BackendContext(options=msgspec.convert(options or {}, backend.Options), link=link))


def finish(backend: Backend, transfer: Transfer) -> Transfer:
    """Poll until the transfer ended."""
    deadline = time.monotonic() + DEADLINE
    while transfer.outcome is None:
        backend.poll([transfer])
        assert time.monotonic() < deadline, "the transfer did not end"
        time.sleep(0.0005)
    return transfer


def move(backend: Backend, peer: str, blocks: Blocks, op: Op = Op.WRITE) -> list[Transfer]:
    """Move blocks as the core does: cut to the backend's limits."""
    limits = backend.capabilities
    pieces = blocks.slices(limits.max_blocks, limits.max_bytes)
    return [finish(backend, backend.submit(peer, Batch(op, piece, 1, 1))) for piece in pieces]


class Peer:
    """Another process, seen from here.

    Attributes:
        backend: What it has; a plugin's own class of peers says so.
    """

    backend: ClassVar[type[Backend]]

    def __init__(
        self,
        folder: Path,
        link: str,
        layout: Sequence[Sequence[int]],
        options: dict[str, Any] | None = None,
        kind: str = "dram",
    ) -> None:
        folder.mkdir(parents=True)
        self.link = link
        self.memory = Memory(folder, layout, kind)
        self.log = folder / "stderr"
        settings = {"folder": str(folder), "link": link, "layout": layout, "options": options or {}, "kind": kind}
        settings["backend"] = self.backend.__module__, self.backend.__name__
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self.regions: tuple[Region, ...] = ()
        self.descriptor = b""

    def ready(self) -> Self:
        """Wait until it is up; several can start at once."""
        answer = self._answer()
        self.descriptor = base64.b64decode(answer["descriptor"])
        self.regions = tuple(msgspec.convert(answer["regions"], list[Region]))
        return self

    def ask(self, **command: Any) -> Any:
        """Have it do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def invite(self, link: str, descriptor: bytes, regions: Sequence[Region]) -> Any:
        """Have it connect to us."""
        raw = base64.b64encode(descriptor).decode()
        return self.ask(do="connect", peer=link, descriptor=raw, regions=msgspec.to_builtins(regions))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitpid(self.process.pid, os.WUNTRACED)  # it takes a moment

    def end(self) -> int:
        """Let it end by itself: its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        status = self.process.wait(DEADLINE)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.link} ended: {self.log.read_text()}"
        return json.loads(line)


def serve(settings: dict[str, Any]) -> None:
    """Be that other process."""
    memory = Memory(Path(settings["folder"]), settings["layout"], settings["kind"])
    module, name = settings["backend"]
    backend = make(getattr(importlib.import_module(module), name), settings["link"], settings["options"])
    backend.register(memory.regions)
    raw = base64.b64encode(backend.descriptor()).decode()
    print(json.dumps({"descriptor": raw, "regions": msgspec.to_builtins(memory.regions)}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "connect":
            regions = msgspec.convert(command["regions"], list[Region])
            backend.connect(command["peer"], base64.b64decode(command["descriptor"]), regions)
        print(json.dumps({"done": command["do"]}), flush=True)
    backend.close()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
