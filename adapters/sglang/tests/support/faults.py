"""Faults of the transport in one rank of a real server, by the backends of `faulty_backends`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .servers import Server

__all__ = ["Faults"]

PLUGINS = Path(__file__).parents[4] / "tests" / "helpers" / "plugins"


class Faults:
    """Orders for servers that are started with `environment`.

    Args:
        folder: Where the orders are left.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the servers."""
        return {"STATELINK_FAULTS": str(self._folder), "PYTHONPATH": str(PLUGINS)}

    def plan(self, server: Server, rank: int, call: str, what: str, peer: int) -> None:
        """Let something happen in one rank of a server: see `faulty_backends.plan`.

        Args:
            server: Which server.
            rank: Its rank.
            call: The method whose next call it is.
            what: What happens.
            peer: The rank of the other server that the call concerns.
        """
        self._order(server, rank, "plan", call, what, 0, 1, f"*.{peer}-*")

    def heal(self, server: Server, rank: int) -> None:
        """Let nothing happen there any more, and let go on what hangs."""
        self._order(server, rank, "heal")

    def wait_struck(self, server: Server, rank: int, what: str, seconds: float = 60.0) -> None:
        """Wait until something has happened there, and forget it."""
        until = time.monotonic() + seconds
        while True:
            for file in self._folder.glob(f"{_links(server, rank)}.struck"):
                if what in file.read_text().split():
                    file.unlink()
                    return
            assert time.monotonic() < until, f"{what!r} does not happen in rank {rank} of {server.name}"
            time.sleep(0.05)

    def _order(self, server: Server, rank: int, *order: Any) -> None:
        """Leave an order, which the rank takes at its next call of the backend."""
        file = self._folder / _links(server, rank)
        assert not file.exists(), f"rank {rank} of {server.name} has not taken the last order"
        made = file.with_name(f"{file.name}.made")
        made.write_text(json.dumps(order))
        os.replace(made, file)


def _links(server: Server, rank: int) -> str:
    """A pattern of the name of the link of one rank."""
    return f"sglang-{server.name}-*.{rank}-*"
