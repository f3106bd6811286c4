"""NIXL's threads that share large batches, and what makes them close connections."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from ._library import SCRATCH, SPLIT
from ._tables import DRAM, row

if TYPE_CHECKING:
    from ._library import Library
    from ._options import Options

__all__ = ["Threads"]

NIXLS_SPLIT = 1024
"""`SPLIT` where nobody gives NIXL a number."""
GREETINGS = 3
"""Over TCP, with one, UCX prints an error on the other side of every second connection that is closed soon. With two,
it does so of one in 14."""
NBYTES = 64
END_SECONDS = 0.5
"""Seconds to wait for a transfer within this process, which takes about a millisecond."""


class Threads:
    """The threads of ``num_threads`` of one agent. Call it under the agent's lock.

    Each has connections of its own. It works on them only while it has a part of a transfer. So when a remote agent is
    removed, each keeps the files of a connection to that agent that is not complete or broken, until it gets a part of
    another transfer.

    Args:
        library: The library.
        agent: The agent, with `SCRATCH` registered.
        name: The agent's name.
        options: The backend's options.

    Attributes:
        blocks: Number of blocks of the smallest transfer in which every thread of the agent has a part.
        greetings: Number of such transfers after which every connection to a new remote agent is complete. A thread
            works on its connection only while it has a part of a transfer, and the first part may end before that.
    """

    def __init__(self, library: Library, agent: Any, name: str, options: Options) -> None:
        self._library = library
        self._agent = agent
        self._name = name
        given = options.backends.get("UCX", {"num_threads": "0"})
        threads, split = given.get("num_threads", str(options.num_threads)), given.get("split_batch_size", "")
        usual = SPLIT if options.num_threads else NIXLS_SPLIT
        count, fewest = (int(text) if text.isdecimal() else other for text, other in ((threads, 0), (split, usual)))
        self._any = count > 0
        self.blocks = count * fewest if self._any else 1
        self.greetings = GREETINGS if self._any else 0
        self._unended: list[Any] = []
        """Transfers that have not ended. NIXL may not release them before."""

    def close_connections(self) -> None:
        """Have each close its connections to remote agents that were removed. Takes about a millisecond.

        The threads get parts of a transfer of a few bytes from this process to itself. If NIXL refuses it, the files
        stay until the next remote agent is removed, or the agent ends.
        """
        if not self._any:
            return
        near, far = (
            np.repeat(row(SCRATCH.ctypes.data + place, NBYTES), self.blocks, axis=0)
            for place in (0, SCRATCH.nbytes // 2)
        )
        agent = self._agent
        with contextlib.suppress(*self._library.errors):
            handle = agent.initialize_xfer(
                "WRITE", agent.get_xfer_descs(near, DRAM), agent.get_xfer_descs(far, DRAM), self._name
            )
            self._unended.append(handle)
            state, until = agent.transfer(handle), time.monotonic() + END_SECONDS
            while state == "PROC" and time.monotonic() < until:
                state = agent.check_xfer_state(handle)
        self._release()

    def _release(self) -> None:
        """Release the transfers that have ended."""
        left = []
        for handle in self._unended:
            state = "ERR"
            with contextlib.suppress(*self._library.errors):
                state = self._agent.check_xfer_state(handle)
            if state == "PROC":
                left.append(handle)
                continue
            with contextlib.suppress(*self._library.errors):
                handle.release()
        self._unended = left

    def end(self) -> None:
        """Let go of the agent, which then ends."""
        self._unended = []
        self._agent = None
