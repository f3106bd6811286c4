"""The strategy: decides which components are staged, and owns their rings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from statelink._logs import logger
from statelink.backend import Capabilities, ReceiveHook, SendHook, Strategy
from statelink.errors import ConfigError, UnsupportedError
from statelink.state import Region

from ._memory import StagingMemory, staging_memory
from ._receive import StagedReceive
from ._ring import Ring
from ._send import StagedSend

if TYPE_CHECKING:
    from statelink.plan import Move
    from statelink.state import Inventory

__all__ = ["Staged"]

log = logger("statelink.staged")

COSTS = {"dram": (250e-9, 2e9), "cuda": (230e-9, 1.2e9)}
"""The cost of staging on each side, by kind of memory: seconds for each block, and bytes for each second.

Measured with whole requests, the messages for space included. Host memory: on two busy cores; numpy itself is about
four times as fast. CUDA: on an H200, from the time of 65,552 blocks of 512 bytes and of 128 blocks of 4 MiB.
"""

_kept: list[Ring] = []
"""Rings of closed links that may still be in flight. They are kept, so that nobody else gets their memory."""


class Staged(Strategy):
    """Moves components through rings, if the backend would spend its time on small blocks. Serves one link.

    Args:
        capabilities: The backend's capabilities.
        ring_bytes: Size of a ring; there is one for each kind of memory, and for each direction if the link has
            both roles.
        parcel_bytes: Most bytes of a parcel.
        modes: Component to ``auto`` or ``always``.
        both_roles: Whether the link sends and receives. It then has a ring for each direction: with one, two links that
            send to each other could each wait for space that the other's requests hold.
    """

    name = "staged"

    def __init__(
        self,
        capabilities: Capabilities,
        *,
        ring_bytes: int,
        parcel_bytes: int,
        modes: Mapping[str, Literal["auto", "always"]],
        both_roles: bool = False,
    ) -> None:
        self._block_seconds = capabilities.block_seconds
        self._ring_bytes = ring_bytes
        self._parcel_bytes = min(parcel_bytes, ring_bytes)
        self._modes = modes
        self._rings: dict[tuple[str, str], Ring] = {}
        """By kind of memory and direction."""
        self._sends: dict[str, Ring] = {}
        """By component."""
        self._receives: dict[str, Ring] = {} if both_roles else self._sends

    def open(self, inventory: Inventory, components: Sequence[str]) -> Sequence[Region]:
        """Make a ring for each kind of memory of the components, and for each direction if the link has both roles.

        Raises:
            UnsupportedError: A component with mode ``always`` cannot be staged.
            ConfigError: There is not enough memory for a ring.
        """
        for name in components:
            buffers = inventory.component(name).buffers
            kinds = {inventory.regions[buffer.region].kind for buffer in buffers if buffer.count}
            try:
                if len(kinds) > 1:
                    raise UnsupportedError(
                        f"component {name!r} cannot be staged", cause=f"it lies in {', '.join(sorted(kinds))} memory"
                    )
                for kind in kinds:
                    for direction, ring_of in (("send", self._sends), ("receive", self._receives)):
                        if name in ring_of:
                            continue  # one ring serves both
                        if (kind, direction) not in self._rings:
                            memory = _allocated(kind, self._ring_bytes)
                            self._rings[kind, direction] = Ring(memory, len(inventory.regions) + len(self._rings))
                        ring_of[name] = self._rings[kind, direction]
            except UnsupportedError as error:
                if self._modes[name] == "always":
                    raise
                log.info("component %s is not staged: %s", name, error)
        memories = [ring.memory for ring in self._rings.values()]
        return [Region(memory.address, memory.nbytes, memory.kind) for memory in memories]

    def sender(self) -> SendHook:
        """A hook for one room and destination."""
        return StagedSend(self._sends, self._parcel_bytes)

    def receiver(self) -> ReceiveHook:
        """A hook for one room and writer."""
        return StagedReceive(self._receives, self._wanted)

    def _wanted(self, component: str, move: Move) -> bool:
        """Whether to stage a component: yes if a block costs more than copying its bytes twice."""
        kind = self._receives[component].memory.kind
        row_seconds, copy_bytes = COSTS[kind.partition(":")[0]]
        copies = 2 * (row_seconds + move.block_nbytes / copy_bytes)
        return self._modes[component] == "always" or self._block_seconds > copies

    def snapshot(self) -> Mapping[str, int]:
        """Bytes of the rings, bytes in use, quarantined bytes, and how many parcels wait for space."""
        total: Counter[str] = Counter()
        for ring in self._rings.values():
            total.update(ring.snapshot())
        return total

    def close(self) -> None:
        """Free the rings, but keep those that may still be in flight."""
        for ring in self._rings.values():
            if ring.snapshot()["in_use"]:
                log.warning("%d bytes of a staging ring may still be touched: it is kept", ring.snapshot()["in_use"])
                _kept.append(ring)


def _allocated(kind: str, nbytes: int) -> StagingMemory:
    try:
        return staging_memory(kind, nbytes)
    except (MemoryError, OverflowError, RuntimeError, ValueError) as error:  # the errors of numpy and torch
        raise ConfigError(
            f"a staging ring of {nbytes} bytes of {kind!r} memory cannot be allocated",
            cause=str(error),
            hint="make ring_bytes of staging smaller: rings may be much smaller than a request",
            code="config.staging",
        ) from error
