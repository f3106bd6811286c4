"""Traces one small push, or one receive: the functions and files of the core that it passes.

``python -m tools.push_trace`` opens a prefill and a decode link over `tcp` in this process, and hands over a few
requests of one page. Then it lists what the threads of both links call from `Sending.push` until `TcpBackend.submit`
begins (``--until submit``, the default), or until both rooms have succeeded (``--until finished``). With ``--until
requested``, it lists what is called from `Link.receive` until `Channel.send` begins with the request. Each file has a
line, in the order in which it is entered first, with the number of its functions. A change of file is a call, or a
return, from a function of one file to one of another.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import statelink
from statelink import Status, state
from statelink.tcp import TcpBackend
from statelink.wire import Channel

if TYPE_CHECKING:
    from types import CodeType, FrameType

CORE = str(Path(statelink.__file__).parent) + "/"
WARM = 20
"""Requests before the one that is traced, so that connections and plans are made."""
QUIET_SECONDS = 0.5
"""Seconds before the first call that is traced, so that nothing else happens meanwhile."""
LAST: dict[str, CodeType | None] = {
    "submit": TcpBackend.submit.__code__,
    "requested": Channel.send.__code__,
    "finished": None,
}
"""The function whose call ends each trace; ``None`` for the end of the room."""


class Traced(NamedTuple):
    """What one push, or one receive, passed.

    Attributes:
        files: The files in the order in which they were entered, each with its functions.
        calls: Calls of functions of the core.
        changes: Calls and returns from a file to another, in each thread.
        threads: Threads that ran functions of the core.
    """

    files: dict[str, set[str]]
    calls: int
    changes: int
    threads: int


class Trace:
    """Notes calls of the core's functions on every thread that begins after `install`, while it is on."""

    def __init__(self, last: CodeType | None) -> None:
        self._last = last
        self._on = False
        self._done = threading.Event()
        self._noted: list[tuple[int, str, str, bool]] = []

    def install(self) -> None:
        """Watch this thread, and those that begin later."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def start(self) -> None:
        """Begin to note."""
        self._on = True

    def stop(self) -> None:
        """End, if the last function has not ended it before."""
        self._on = False
        threading.setprofile(None)
        sys.setprofile(None)

    def wait(self, seconds: float) -> bool:
        """Wait for the last function. Returns whether it came."""
        return self._done.wait(seconds)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self._on or event not in ("call", "return"):
            return
        code = frame.f_code
        if code.co_filename.startswith(CORE):
            # A list's `append` is one step for all threads.
            name = code.co_filename[len(CORE) :]
            self._noted.append((threading.get_ident(), name, f"{code.co_name}:{code.co_firstlineno}", event == "call"))
        if code is self._last:
            self._on = False
            self._done.set()

    def found(self) -> Traced:
        """What was noted."""
        files: dict[str, set[str]] = {}
        before: dict[int, list[str]] = defaultdict(list)
        calls = changes = 0
        for thread, name, function, entered in self._noted:
            stack = before[thread]
            if entered:
                calls += 1
                changes += bool(stack) and stack[-1] != name
                files.setdefault(name, set()).add(function)
                stack.append(name)
            elif stack:
                left = stack.pop()
                changes += bool(stack) and stack[-1] != left
        return Traced(files, calls, changes, len(before))


def trace(until: str) -> Traced:
    """Hand over requests of one page over `tcp`, and trace the last one's push or receive."""
    last = LAST[until]
    noted = Trace(last)
    noted.install()
    pages = [np.zeros((8, 16, 4, 32), np.float32) for _ in range(4)]
    described = [
        state.describe(name, [state.kv_pages({0: (k, v)}, heads=4)], model="traced@1")
        for name, (k, v) in (("prefill", pages[:2]), ("decode", pages[2:]))
    ]
    config = {"backend": "tcp", "heartbeat": 100.0, "liveness": 400.0}
    page = np.zeros(1, np.int64)
    try:
        with (
            statelink.open({"role": "prefill", **config}, described[0]) as prefill,
            statelink.open({"role": "decode", **config}, described[1]) as decode,
        ):
            address = prefill.address
            for room in range(1, WARM + 2):
                traced = room > WARM
                if traced and until == "requested":
                    time.sleep(QUIET_SECONDS)
                    noted.start()
                receiving = decode.receive(room, peer=address, tokens=16)
                receiving.accept({"kv": page})
                if traced and until == "requested" and not noted.wait(20):
                    raise SystemExit("no request was sent")
                sending = prefill.send(room, tokens=16)
                if traced and until != "requested":
                    time.sleep(QUIET_SECONDS)
                    noted.start()
                sending.push({"kv": page})
                if traced and until == "submit" and not noted.wait(20):
                    raise SystemExit("nothing was submitted")
                ended = [each.wait(timeout=20) for each in (receiving, sending)]
                if ended != [Status.SUCCEEDED] * 2:
                    raise SystemExit(f"a request of one page ended with {ended}")
            noted.stop()
    finally:
        noted.stop()
    return noted.found()


def main() -> int:
    """Print the trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--until", choices=tuple(LAST), default="submit")
    traced = trace(parser.parse_args().until)
    for name, functions in traced.files.items():
        print(f"{len(functions):4} {name}")
    total = sum(map(len, traced.files.values()))
    print(
        f"{traced.calls} calls of {total} functions in {len(traced.files)} files, {traced.changes} changes of file, "
        f"{traced.threads} threads"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
