"""The bare library: an agent here, and one in another process, whose memory this process sees, too."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from statelink_nixl import NixlBackend, Options

__all__ = ["MIB", "SMALL", "Far", "Near", "error", "far", "finish", "listing"]

MIB = 1 << 20
SMALL = 64
"""Bytes of a block that only shows whether a peer is reached."""


class Near:
    """An agent of this process, and memory that it registered.

    Args:
        name: Its name.
        nbytes: Size of the memory.
        parameters: Those of NIXL's backend UCX, all of them strings.
    """

    def __init__(self, name: str, nbytes: int = MIB, **parameters: str) -> None:
        if not NixlBackend.probe(Options()).ok:  # prepares the environment that NIXL reads once, and imports NIXL
            raise RuntimeError("NIXL cannot be used here")
        import nixl._api as api

        config = api.nixl_agent_config(
            enable_prog_thread=True, backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        self.agent: Any = api.nixl_agent(name, config)
        self.agent.create_backend("UCX", parameters)
        self.array: npt.NDArray[np.uint8] = np.zeros(nbytes, np.uint8)
        self.add(self.array)

    def add(self, array: npt.NDArray[np.uint8]) -> None:
        """Register memory."""
        self.agent.register_memory([(array.ctypes.data, array.nbytes, 0, "")], "DRAM")

    def handle(self, peer: Far, count: int = 1, nbytes: int = SMALL, *, shift: int = 0) -> Any:
        """A write of blocks, from the start of the memory here to the start of the peer's, or `shift` bytes after."""
        near = listing(self.array.ctypes.data, count, nbytes)
        far = listing(peer.address + shift, count, nbytes)
        agent = self.agent
        return agent.initialize_xfer(
            "WRITE", agent.get_xfer_descs(near, "DRAM"), agent.get_xfer_descs(far, "DRAM"), peer.name
        )

    def write(self, peer: Far, count: int = 1, nbytes: int = SMALL) -> None:
        """Write blocks, and wait."""
        handle = self.handle(peer, count, nbytes)
        finish(self.agent, handle, self.agent.transfer(handle))
        handle.release()


class Far:
    """An agent of another process.

    Attributes:
        name: Its name.
        address: Where its memory is in that process.
        array: The same memory, mapped here.
        metadata: NIXL's own description of the agent.
    """

    def __init__(self, name: str, file: Path, nbytes: int, parameters: dict[str, str]) -> None:
        self.name = name
        file.write_bytes(b"")
        os.truncate(file, nbytes)
        words = (sys.executable, "-m", __spec__.name, name, str(file), json.dumps(parameters))
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with file.open("r+b") as opened:
            self.array = np.frombuffer(mmap.mmap(opened.fileno(), 0), np.uint8)
        said = self._answer()
        self.address: int = said["address"]
        self.metadata = bytes.fromhex(said["metadata"])

    def destroy_agent(self) -> None:
        """Destroy the agent there. The process and its memory stay."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._answer()

    def stop(self) -> None:
        """Stop the process until `go_on`."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the process; it may have ended before."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


@contextlib.contextmanager
def far(folder: Path, name: str = "far", nbytes: int = MIB, **parameters: str) -> Iterator[Far]:
    """An agent of another process, which is killed at the end."""
    peer = Far(name, folder / name, nbytes, parameters)
    try:
        yield peer
    finally:
        peer.kill()


def listing(address: int, count: int = 1, nbytes: int = SMALL) -> npt.NDArray[np.uint64]:
    """Blocks one after the other, as NIXL takes them."""
    found = np.zeros((count, 3), np.uint64)
    found[:, 0] = np.uint64(address) + np.arange(count, dtype=np.uint64) * np.uint64(nbytes)
    found[:, 1] = nbytes
    return found


def finish(agent: Any, handle: Any, state: str) -> None:
    """Look at a transfer until it is done."""
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    assert state == "DONE"


def error(name: str) -> Any:
    """A class of NIXL's errors."""
    import nixl._api as api

    return getattr(api.nixlBind, name)


def _serve(name: str, file: str, parameters: dict[str, str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # UCX writes its warnings to standard output
    with Path(file).open("r+b") as opened:
        memory = np.frombuffer(mmap.mmap(opened.fileno(), 0), np.uint8)
    here: Near | None = Near(name, 1, **parameters)
    assert here is not None
    here.add(memory)
    said = {"address": memory.ctypes.data, "metadata": here.agent.get_agent_metadata().hex()}
    print(json.dumps(said), file=answers, flush=True)
    sys.stdin.readline()
    here = None
    print("null", file=answers, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
    os._exit(0)
