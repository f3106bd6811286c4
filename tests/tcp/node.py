"""The backends of one process, over memory that a test sees."""

from __future__ import annotations

import os
import select
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.helpers.peers import until

from statelink.backend import BackendContext, Batch, Blocks, Outcome, Region, Transfer
from statelink.link.runtime import Loop
from statelink.tcp import TcpBackend

U64 = npt.NDArray[np.uint64]
EVERYTHING = (1, (1 << 64) - 1)


def void(*_: object) -> None:
    """Forget a result."""


class Node:
    """One process's backends, by link name, over one piece of memory. Every argument and result can be pickled."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.memory = memory
        self.address = self.memory.ctypes.data
        self.region = (self.address, self.memory.nbytes)
        self.backends: dict[str, TcpBackend] = {}
        self._loops: dict[str, Loop] = {}
        self._transfers: list[Transfer] = []

    def where(self) -> int:
        return self.address

    def open(self, link: str, *, loop: bool = False, **options: Any) -> bytes:
        """Open a backend, with the control thread of a link or without one."""
        backend = TcpBackend(BackendContext(options=TcpBackend.Options(**options), link=link))
        if loop:
            self._loops[link] = made = Loop()
            backend.use_loop(made.readers)
            made.start(lambda timeout: void(select.select([made], [], [], timeout)), lambda: None)
        backend.register([Region(*self.region)])
        self.backends[link] = backend
        return backend.descriptor()

    def descriptor(self, link: str) -> bytes:
        return self.backends[link].descriptor()

    def connect(self, link: str, peer: str, descriptor: bytes, region: tuple[int, int] = EVERYTHING) -> None:
        self.backends[link].connect(peer, descriptor, [Region(*region)])

    def grant(self, link: str, peer: str, room: int, generation: int, addresses: U64, nbytes: U64) -> None:
        self.backends[link].grant(peer, room, generation, addresses, nbytes)

    def revoke(self, link: str, peer: str, room: int, generation: int) -> int:
        return self._keep(self.backends[link].revoke(peer, room, generation))

    def write(self, link: str, peer: str, room: int, generation: int, source: U64, target: U64, nbytes: U64) -> int:
        zeros = np.zeros(len(nbytes), np.uint32)
        batch = Batch(Blocks(source, target, nbytes, zeros, zeros), room, generation)
        return self._keep(self.backends[link].submit(peer, batch))

    def outcome(self, transfer: int) -> Outcome:
        outcome: Outcome = until(lambda: self._transfers[transfer].outcome, what="the end of a transfer")
        return outcome

    def settled(self, link: str, transfer: int) -> Outcome:
        """The outcome of a transfer that failed, once it is settled."""
        left = self._transfers[transfer]

        def look() -> bool:
            self.backends[link].poll([left])
            return left.outcome is not None and left.outcome.settled is True

        until(look, what="the proof that a transfer has stopped")
        assert left.outcome is not None
        return left.outcome

    def pending(self, transfer: int) -> bool:
        return self._transfers[transfer].outcome is None

    def mode(self, link: str, peer: str) -> str:
        """How bytes travel: the receiver copies them out of the sender's memory, or they are sent."""
        copies = "LOOP" if link in self._loops else "COPY"
        return {"process_vm": copies, "socket": "SEND"}[self.backends[link].transport(peer)]

    def disconnect(self, link: str, peer: str) -> None:
        self.backends[link].disconnect(peer)

    def close(self, link: str) -> None:
        self.backends.pop(link).close()
        if link in self._loops:
            assert self._loops.pop(link).stop(20.0)

    def close_all(self) -> None:
        for link in list(self.backends):
            self.close(link)

    def held(self) -> tuple[int, int]:
        """Threads and file descriptors of this process."""
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def do(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method as if this were a `Remote`."""
        return getattr(self, name)(*arguments, **options)

    def _keep(self, transfer: Transfer) -> int:
        self._transfers.append(transfer)
        return len(self._transfers) - 1
