"""Processes of their own for the ranks of a test, and what runs inside them."""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from engine_environments import SGLANG

from statelink.testing import process

PLUGINS = Path(__file__).parents[4] / "tests" / "helpers" / "plugins"
PATIENCE = 90.0
"""Seconds after which a process counts as stuck."""
START = 420.0
"""Seconds that SGLang's imports may take on a busy machine."""
N = 256
"""Tokens of a request, if a test does not say another number."""
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)
CONFIG: dict[str, Any] = {"backend": "tcp", "heartbeat": 0.5, "liveness": 4.0}
IMPATIENT = (10.0, 60.0)
"""Seconds that prefill waits for decode to name its memory, and decode for the state, where requests do not meet."""
rooms = itertools.count(1)


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
        from .rank import Rank

        module, function, named = made
        pools = getattr(importlib.import_module(module), function)(**named)
        with mock.patch.dict(os.environ, STATELINK_SGLANG_CONFIG=json.dumps(config)):
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


class Pair(NamedTuple):
    """A rank on each side that know each other, by the same key in both processes."""

    prefill: Process
    decode: Process
    key: str

    def on(self, process: Process, method: str, *arguments: Any, **named: Any) -> Any:
        return process(Host.rank, self.key, method, *arguments, **named)

    def open(self, room: int, tokens: int = N, prefix: int = 0) -> None:
        self.on(self.prefill, "open", room, tokens)
        self.on(self.decode, "open", room, tokens, prefix)

    def fails(self, room: int, said: str = "") -> str:
        """Both sides fail; decode's reason. Each of them has the text."""
        reasons = []
        for side in (self.decode, self.prefill):
            assert self.on(side, "reach", room, FAILED)[-1] == FAILED, side.name
            reasons.append(self.on(side, "reason", room))
            assert re.search(said, reasons[-1]), reasons
        assert self.on(self.decode, "release", room, 30.0) < 30.0
        self.end(room)
        return str(reasons[0])

    def fails_on_decode(self, room: int) -> str:
        """Decode fails at once, with a reason; prefill hears of it from decode, or reaches its limit."""
        assert self.on(self.decode, "reach", room, FAILED, seconds=IMPATIENT[0])[-1] == FAILED
        reason = self.on(self.decode, "reason", room)
        assert self.on(self.decode, "arrived", room) == 0
        assert self.on(self.prefill, "reach", room, FAILED)[-1] == FAILED
        self.on(self.prefill, "reason", room)
        self.end(room)
        return str(reason)

    def succeeds(self, room: int) -> None:
        """Both sides succeed, every byte is there, and none is where it does not belong."""
        for side in (self.decode, self.prefill):
            assert self.on(side, "reach", room, SUCCESS)[-1] == SUCCESS, self.on(side, "reason", room)
        sent, arrived = self.on(self.prefill, "items", room), self.on(self.decode, "items", room)
        assert list(sent) == list(arrived)
        for part, buffers in sent.items():
            for ours, theirs in zip(buffers, arrived[part], strict=True):
                assert ours.any()
                assert np.array_equal(ours, theirs), part
        assert self.on(self.decode, "stray", room) == 0
        self.end(room)

    def end(self, room: int) -> None:
        for side in (self.decode, self.prefill):
            self.on(side, "end", room)

    def ordinary(self, prefix: int = 0, room: int = 0) -> None:
        """A request without a fault succeeds."""
        room = room or next(rooms)
        self.on(self.decode, "wipe")
        self.open(room, N, prefix)
        self.on(self.decode, "name", room)
        assert self.on(self.prefill, "reach", room, WAITING)[-1] == WAITING
        self.on(self.prefill, "send", room, 64, 128)
        self.succeeds(room)
