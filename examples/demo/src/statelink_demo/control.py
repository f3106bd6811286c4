"""A worker's end of the pipes to its parent."""

from __future__ import annotations

import os
import queue
import threading
from typing import TypeVar

import msgspec

from statelink_demo.messages import Command, Event

__all__ = ["Control", "StoppedError"]

FAREWELL = 15.0
"""Seconds that a worker may take to end once its parent hung up."""

_Command = TypeVar("_Command", bound=Command)


class StoppedError(Exception):
    """The worker cannot go on, for a reason that the user can do something about."""


class Control:
    """The worker's end of the pipes: standard input, and what was standard output.

    Standard output itself is turned over to standard error, since libraries may print to it.
    """

    def __init__(self) -> None:
        self._out = os.dup(1)
        os.dup2(2, 1)
        self._encoder = msgspec.json.Encoder()
        self._decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self.closed = False
        """Whether the parent hung up: loops look at it and return."""
        threading.Thread(target=self._read, name="control", daemon=True).start()

    def send(self, event: Event) -> None:
        """Tell the parent."""
        try:
            os.write(self._out, self._encoder.encode(event) + b"\n")
        except BrokenPipeError:
            self.closed = True

    def receive(self, kind: type[_Command]) -> _Command | None:
        """Wait for the next command, or None once the parent hung up."""
        command = self._commands.get()
        if command is not None and not isinstance(command, kind):
            raise TypeError(f"expected {kind.__name__}, got {command}")
        return command

    def _read(self) -> None:
        rest = b""
        # Not through sys.stdin, whose lock an interpreter that ends early would wait for.
        while got := os.read(0, 1 << 16):
            *lines, rest = (rest + got).split(b"\n")
            for line in lines:
                self._commands.put(self._decoder.decode(line))
        self.closed = True
        self._commands.put(None)
        watchdog = threading.Timer(FAREWELL, os._exit, (1,))
        watchdog.daemon = True
        watchdog.start()
