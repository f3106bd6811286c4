"""Faults of the transport in one process of a real server, by the backends of `faulty_backends`."""

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

    def plan(self, server: Server, title: str, *arguments: Any) -> None:
        """Let something happen in the process with this title: see `faulty_backends.plan`."""
        self._order(server, title, "plan", *arguments)

    def heal(self, server: Server, title: str) -> None:
        """Let nothing happen there any more, and let go on what hangs."""
        self._order(server, title, "heal")

    def wait_struck(self, server: Server, title: str, what: str, seconds: float = 60.0) -> None:
        """Wait until something has happened there."""
        file, until = self._folder / f"{server.child(title)}.struck", time.monotonic() + seconds
        while not file.exists() or what not in file.read_text().split():
            assert time.monotonic() < until, f"{what} does not happen in {title} of {server.name}"
            time.sleep(0.05)

    def _order(self, server: Server, title: str, *order: Any) -> None:
        file = self._folder / str(server.child(title))
        until = time.monotonic() + 60
        while file.exists():  # an earlier order
            assert time.monotonic() < until, f"{title} of {server.name} takes no orders"
            time.sleep(0.05)
        made = file.with_suffix(".made")
        made.write_text(json.dumps(order))
        os.replace(made, file)
