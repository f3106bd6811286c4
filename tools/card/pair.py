"""Two processes that play prefill and decode for a part, and what each of them found."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from statelink.testing.process import Process

__all__ = ["PAGE_TOKENS", "Side", "both", "succeeded"]

PAGE_TOKENS = 16
Job = dict[str, Any]
Side = Callable[[str, Connection, Job], Any]
"""Runs in a process of its own, with its role, a pipe to the other side, and what to do. Returns what it found."""


def both(side: Side, job: Job, seconds: float) -> dict[str, Any]:
    """Run both sides, which print where this process does. Returns what each found, by role.

    Raises:
        RuntimeError: A side raised an error, ended without an answer, or took too long.
    """
    found: dict[str, Any] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "pipe")
        with (
            Process(partial(Listener, path), name="prefill", patience=seconds, output=1) as prefill,
            Process(partial(str, path), name="decode", patience=seconds, output=1) as decode,
        ):
            prefill(_listens)
            prefill.start(_prefill, side, job)
            decode.start(_decode, side, job)
            for process in (prefill, decode):
                try:
                    found[process.name] = process.result()
                except Exception as error:
                    failed.append(f"{process.name}: {error}")
    if failed:
        raise RuntimeError("; ".join(failed))
    return found


def succeeded(room: Any) -> None:
    """Wait for a room's success, and until nothing touches its memory."""
    room.wait(30, quiesced=True)
    room.check()


def _listens(listener: Listener) -> None:
    """Decode can connect once this has been called."""


def _prefill(listener: Listener, side: Side, job: Job) -> Any:
    with listener.accept() as pipe:  # so that a side sees when the other one fails
        return side("prefill", pipe, job)


def _decode(path: str, side: Side, job: Job) -> Any:
    with Client(path) as pipe:
        return side("decode", pipe, job)
