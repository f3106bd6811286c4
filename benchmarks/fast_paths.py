"""What each fast path saves: small requests with it, and with the general way that it stands for, in turn.

    python -m benchmarks.fast_paths [PATH ...] [--backend tcp] [--in-flight 64] [--busy none] [--rooms 1500]
                                    [--rounds 5] [--json]

A fast path gives the same answer as a general way, sooner. `docs/design.md` lists them with the tests that compare the
two. Each run plays the requests of `benchmarks.rooms` in two fresh processes. A run without a path replaces it by the
general way in both of them.

Printed per path: the microseconds of CPU time that both processes spend less on a request because of it, as a median
over the rounds, and their share of what a request costs without it. The same for the time from ``receive`` to
*succeeded*.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from typing import TYPE_CHECKING, Any

from . import rooms
from .busy import BUSY
from .rows import show

if TYPE_CHECKING:
    from collections.abc import Callable


def shapes() -> None:
    """The blocks of a small request in one expression: `plan.Shapes`. The general way: `plan_move` and its blocks."""
    from statelink.plan._whole import Shapes

    Shapes.whole = lambda *_: None  # type: ignore[method-assign]


def joint() -> None:
    """The small pushes of several requests in one batch: `Line`. The general way: a batch for each."""
    from statelink.link.prefill._line import Line

    Line._joinable = lambda *_: False  # type: ignore[method-assign]


def pushes_here() -> None:
    """Short pushes on the control thread: `KeyedExecutor.run_here`. The general way: a data thread runs them."""
    from statelink.link.runtime._executor import KeyedExecutor

    KeyedExecutor.run_here = lambda *_, **__: False  # type: ignore[method-assign]


def fences_here() -> None:
    """Short calls of fences and hooks on the control thread: `Workers.fence_here`. The general way: a data thread."""
    from statelink.link.runtime._executor import KeyedExecutor

    KeyedExecutor.run_beside = lambda *_: False  # type: ignore[method-assign]


def sole() -> None:
    """A request that alone decides about a room: `Claims.sole`. The general way: `Claims.complete` and `stale`."""
    from statelink.link.prefill._claims import Claims

    Claims.sole = lambda *_: False  # type: ignore[method-assign]


def few_ranges() -> None:
    """A few ranges of a grant as numbers of Python: `Grantable._few`. The general way: numpy."""
    from statelink.link.decode import _part

    _part.RANGES_ONE_BY_ONE = -1  # type: ignore[misc]


def few_blocks() -> None:
    """Ranges of memory as lists: `backend.Ranges`. The general way: numpy."""
    from statelink.backend import _ranges

    _ranges.BLOCKS_ONE_BY_ONE = -1


def few_indices() -> None:
    """A few indices as numbers of Python: `plan.Items`. The general way: numpy."""
    from statelink.plan import _items

    _items.INDICES_ONE_BY_ONE = -1


def drawn() -> None:
    """Numbers of uses drawn 64 at a time. The general way: one by one."""
    from statelink.link.decode import _role

    _role.GENERATIONS_AT_ONCE = 1


def frames() -> None:
    """ZeroMQ's calls that keep the interpreter: `wire/_frames.py`. The general way: pyzmq's own."""
    from statelink.wire import _frames

    _frames._calls = None


def bell() -> None:
    """The control thread's descriptors with calls that keep the interpreter. The general way: `os`, `select`."""
    import os
    from select import EPOLLIN

    from statelink.link.runtime import _loop

    _loop._write = lambda descriptor, one, _: os.write(descriptor, one)
    _loop._read = lambda descriptor, _, width: os.read(descriptor, width)

    def take(self: Any) -> Any:
        if not self._ready:
            return
        for descriptor, events in self._epoll.poll(0, _loop.MOST_DESCRIPTORS):
            ready = self._ready.get(descriptor)
            if ready is not None and events & EPOLLIN:
                yield ready

    _loop.Readers.take = take  # type: ignore[method-assign]


def flag() -> None:
    """A flag that makes its lock when a thread waits: `Flag`. The general way: `threading.Event`."""
    import threading

    from statelink.link import _room_memory, _room_state
    from statelink.link.prefill import _push

    class Event(threading.Event):
        def __init__(self, raised: bool = False) -> None:
            super().__init__()
            if raised:
                self.set()

        @property
        def raised(self) -> bool:
            return self.is_set()

    for module in (_push, _room_memory, _room_state):
        module.Flag = Event  # type: ignore[attr-defined]


def iovec() -> None:
    """`tcp`'s calls that keep the interpreter for small batches. The general way: those that let go of it."""
    from statelink.tcp import _iovec

    _iovec._keeping = _iovec._letting_go


PATHS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        shapes,
        joint,
        pushes_here,
        fences_here,
        sole,
        few_ranges,
        few_blocks,
        few_indices,
        drawn,
        frames,
        bell,
        flag,
        iovec,
    )
}


def run(path: str, options: dict[str, Any], answer: Any) -> None:
    """One run, in a process of its own. ``path``: which one to do without; empty for none."""
    without = PATHS.get(path)
    if without is not None:
        without()
    answer.send(rooms.measure(**options, without=without))


def measured(path: str, options: dict[str, Any]) -> tuple[float, float]:
    """Microseconds of CPU time of both processes, and from ``receive`` to *succeeded*, of one request."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(path, options, theirs))
    process.start()
    theirs.close()
    row = ours.recv()
    process.join()
    return 1e3 * (row["prefill_cpu_ms"] + row["decode_cpu_ms"]), 1e3 * row["median_ms"]


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", choices=[*PATHS, []], metavar="PATH", help=", ".join(PATHS))
    parser.add_argument("--backend", default="tcp")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--busy", choices=BUSY, default="none")
    parser.add_argument("--rooms", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    options = {name: getattr(arguments, name) for name in ("backend", "rooms", "in_flight", "busy")}
    for path in arguments.paths or PATHS:
        pairs = [(measured(path, options), measured("", options)) for _ in range(arguments.rounds)]
        cpu, latency = ([(slow[at], slow[at] - fast[at]) for slow, fast in pairs] for at in (0, 1))
        row = {"path": path, "backend": arguments.backend, "busy": arguments.busy}
        for name, both in (("cpu", cpu), ("latency", latency)):
            saved = statistics.median(difference for _, difference in both)
            row[f"{name}_saved_us"] = round(saved, 1)
            row[f"{name}_saved"] = f"{saved / statistics.median(slow for slow, _ in both):.1%}"
        show(row, arguments.json)


if __name__ == "__main__":
    main()
