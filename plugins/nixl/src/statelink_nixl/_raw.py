"""NIXL without Statelink: what the backend is measured against."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._library import Library
from ._tables import place

if TYPE_CHECKING:
    import numpy.typing as npt

    from statelink.backend import Region

    Rows = npt.NDArray[np.uint64]

    from ._options import Options

__all__ = ["RawNixl"]


class RawNixl:
    """One ``initialize_xfer`` over arrays of blocks, and ``transfer``.

    The agent is made as the plugin's own, because the progress thread of NIXL's default never rests. On few cores, that
    would slow down everything that is measured beside it.

    Args:
        name: The agent's name.
        options: The backend's options.
        regions: Memory to register.
    """

    def __init__(self, name: str, options: Options, regions: Sequence[Region]) -> None:
        library = Library()
        self._errors = library.errors
        self._agent: Any = library.agent(name, options)
        self._kind, self._device = place(regions[0])
        memory = np.array([[each.address, each.nbytes] for each in regions], np.uint64)
        try:
            self._agent.register_memory(self._wide(memory), self._kind)
        except self._errors as error:
            raise OSError(f"NIXL does not register memory: {error}") from error

    def address(self) -> bytes:
        """NIXL's own description of the agent."""
        return bytes(self._agent.get_agent_metadata())

    def connect(self, peer: bytes, source: Rows, target: Rows) -> None:
        """Load the other agent."""
        try:
            self._peer = self._agent.add_remote_agent(peer)
        except self._errors as error:
            raise OSError(f"NIXL does not connect: {error}") from error
        self._ends = self._wide(source), self._wide(target)

    def move(self) -> float:
        """Make a handle, post it, and poll until it is done."""
        agent = self._agent
        began = time.perf_counter()
        try:
            handle = agent.initialize_xfer(
                "WRITE", *(agent.get_xfer_descs(rows, self._kind) for rows in self._ends), self._peer
            )
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            took = time.perf_counter() - began
            handle.release()
        except self._errors as error:
            raise OSError(f"NIXL does not move the blocks: {error}") from error
        if state != "DONE":
            raise OSError(f"NIXL reports {state}")
        return took

    def close(self) -> None:
        """Let go of the agent, which ends it."""
        self._agent = None

    def _wide(self, rows: Rows) -> Rows:
        """With a third column, the device."""
        return np.concatenate([rows, np.full((len(rows), 1), self._device, np.uint64)], axis=1)
