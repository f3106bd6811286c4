"""Counts what a process does for a request. Runs in a worker process; see `test_budgets`."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from statelink.backend import RegionTable
from statelink.registry import load_backend
from statelink.wire import Channel

if TYPE_CHECKING:
    from types import FrameType

CONTROL = "statelink-control"
WHAT = "calls", "other calls", "messages", "batches", "checks", "waits"
_notable: dict[Any, str] = {Channel.send.__code__: "messages", RegionTable.check.__code__: "checks"}
_counts: Counter[str] = Counter()
_before: Counter[str] = Counter()


def begin(backend: str) -> None:
    """Count what those threads do that are started from now on. Call it before a link is opened."""
    _notable[load_backend(backend).submit.__code__] = "batches"
    threading.setprofile(_profile)


def take() -> dict[str, int]:
    """What was done since the last call.

    ``calls`` are calls of functions on the control thread, ``other calls`` those on the other threads of the link and
    its backend. ``waits`` is how often these threads gave their processor back to wait for something. After each wait,
    a thread needs the interpreter again.
    """
    _counts["waits"] = _waits()
    taken = {what: _counts[what] - _before[what] for what in WHAT}
    _before.update(Counter(taken))
    return taken


def _waits() -> int:
    """Voluntary context switches of all threads that Python knows, but the one that answers the test."""
    waits = 0
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and thread.native_id is not None:
            status = f"/proc/{os.getpid()}/task/{thread.native_id}/status"
            with contextlib.suppress(FileNotFoundError), open(status) as file:  # it may have ended meanwhile
                waits += next(int(line.split()[1]) for line in file if line.startswith("voluntary"))
    return waits


def _profile(frame: FrameType, event: str, argument: object) -> None:
    if event in ("call", "c_call"):
        _counts["calls" if threading.current_thread().name == CONTROL else "other calls"] += 1
        if event == "call" and frame.f_code in _notable:
            _counts[_notable[frame.f_code]] += 1
