"""A transfer library without Statelink, as the ceiling of what a backend over it can reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from statelink.state import Region

__all__ = ["RawLibrary", "RawTransfers"]

Rows = npt.NDArray[np.uint64]
"""Address and length in bytes of each block, one row each: shape ``[blocks, 2]``."""


class RawLibrary(Protocol):
    """The library at one end. Used by one thread at a time; every method may block."""

    def address(self) -> bytes:
        """What the source has to know of the target. Called at the target."""

    def connect(self, peer: bytes, source: Rows, target: Rows) -> None:
        """At the source: prepare to move the blocks of ``source`` to those of ``target``, as often as asked.

        Args:
            peer: What the target's ``address`` returned.
            source: Blocks in registered memory of this process, which keeps them alive.
            target: As many blocks of the same lengths in registered memory of the other process.

        Raises:
            OSError: The library does not connect.
        """

    def move(self) -> float:
        """At the source: move all blocks once, as fast as the library can. Returns the seconds until they arrived.

        Raises:
            OSError: The library could not move them.
        """

    def close(self) -> None:
        """Free everything. May be called twice."""


@runtime_checkable
class RawTransfers(Protocol):
    """Implemented by a backend whose library ``statelink bench`` can measure by itself.

    Everything that does not depend on a request happens before `RawLibrary.move`: memory is registered, the peer is
    known, and the blocks are listed.
    """

    @classmethod
    def raw(cls, name: str, options: Any, host: str, regions: Sequence[Region]) -> RawLibrary:
        """Start the library in this process, without a link.

        Args:
            name: A name that no other engine of the library has.
            options: The backend's options.
            host: Host or IP address under which the other process reaches this one.
            regions: Memory to register. It outlives the engine.

        Raises:
            OSError: The library does not start.
        """
