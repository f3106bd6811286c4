"""Processes of their own for the ranks of a test, and what runs inside them."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine_environments import SGLANG

from statelink.testing import process

PLUGINS = Path(__file__).parents[4] / "tests" / "helpers" / "plugins"
PATIENCE = 90.0
"""Seconds after which a process counts as stuck."""
START = 420.0
"""Seconds that SGLang's imports may take on a busy machine."""


class Host:
    """What lives in a process: ranks by their keys."""

    def __init__(self) -> None:
        self.ranks: dict[str, Any] = {}
        logging.basicConfig(level=logging.WARNING)
        self._published: Any = None

    def publish(self, role: str, connector: str, model: str, host: str = "127.0.0.1") -> None:
        """Import SGLang, and publish its configuration."""
        from . import connectors

        self.role, self.connector, self.host = role, connector, host
        self._published = connectors.publish(role, connector, model, 0, host)

    def start(
        self,
        key: str,
        made: tuple[str, str, dict[str, Any]],
        port: int,
        config: dict[str, Any],
        at: str = "",
        **more: Any,
    ) -> None:
        """Make a rank.

        Args:
            key: Its name in this process.
            made: A module, a function of it that makes the pools, and the function's keywords.
            port: The bootstrap server's.
            config: Of Statelink.
            at: The bootstrap server's host, if it is another than this process's.
            more: See `support.rank.Rank`.
        """
        from . import connectors
        from .rank import Rank

        module, function, named = made
        pools = getattr(importlib.import_module(module), function)(**named)
        with connectors.configured(json.dumps(config)):
            where = at or self.host, port
            self.ranks[key] = Rank(self.role, self.connector, self._published, pools, where, **more)

    def rank(self, key: str, method: str, *arguments: Any, **named: Any) -> Any:
        return getattr(self.ranks[key], method)(*arguments, **named)

    def plain(self, module: str, function: str, *arguments: Any) -> Any:
        """Call a function with the arguments."""
        return getattr(importlib.import_module(module), function)(*arguments)


class Process(process.Process[Host]):
    """One operating-system process with ranks in it.

    Args:
        name: For messages.
        inside: A command that runs the one that follows it in another place, such as a network namespace.
        environment: Changes to this process's environment.
    """

    def __init__(self, name: str, inside: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> None:
        path = os.pathsep.join(filter(None, [*sys.path, str(PLUGINS)]))
        given = {**SGLANG, "PYTHONWARNINGS": "ignore", **(environment or {}), "PYTHONPATH": path}
        super().__init__(Host, name=name, patience=PATIENCE, environment=given, through=inside)
