"""The bare library: an agent here, and one in another process, whose memory this process sees, too."""

from __future__ import annotations

import mmap
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from statelink.testing.process import Process
from statelink_nixl import NixlBackend, Options

if TYPE_CHECKING:
    from pathlib import Path

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


class There:
    """An agent with memory that the file of another process is, too. Lives in a process of its own."""

    def __init__(self, name: str, file: Path, parameters: dict[str, str]) -> None:
        self.memory = _mapped(file)
        self.here = Near(name, 1, **parameters)
        self.here.add(self.memory)

    def said(self) -> tuple[int, bytes]:
        """Where the memory is, and NIXL's own description of the agent."""
        return self.memory.ctypes.data, self.here.agent.get_agent_metadata()


class Far(Process[There]):
    """An agent of another process. What UCX prints goes to standard error.

    Attributes:
        address: Where its memory is in that process.
        array: The same memory, mapped here.
        metadata: NIXL's own description of the agent.
    """

    def __init__(self, name: str, file: Path, nbytes: int, parameters: dict[str, str]) -> None:
        file.write_bytes(b"")
        os.truncate(file, nbytes)
        super().__init__(partial(There, name, file, parameters), name=name, output=2)
        self.array = _mapped(file)
        self.address, self.metadata = self(There.said)


def far(folder: Path, name: str = "far", nbytes: int = MIB, **parameters: str) -> Far:
    """An agent of another process, which is killed at the end of a block."""
    return Far(name, folder / name, nbytes, parameters)


def _mapped(file: Path) -> npt.NDArray[np.uint8]:
    with file.open("r+b") as opened:
        return np.frombuffer(mmap.mmap(opened.fileno(), 0), np.uint8)


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
