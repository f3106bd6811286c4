"""A process with engines of the simulated ``memfabric_hybrid`` in it, and memory that the tests see from outside.

Run as a program, it is that process: it prints one line of JSON for each that it is given.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["PAGE", "SIMULATOR", "Engine", "Process"]

SIMULATOR = Path(__file__).parents[1]
PAGE = 2 << 20
SIZE = 6 * PAGE


class Process:
    """Another process, with 6 aligned pages of 2 MiB.

    Args:
        path: File of its memory; one whose name begins with ``npu`` is an NPU's.
        environment: More of its environment.
    """

    def __init__(self, path: Path, **environment: str) -> None:
        with path.open("wb") as file:
            file.truncate(SIZE + PAGE)
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment, "PYTHONPATH": str(SIMULATOR)},
        )
        self.address: int = self.ask()
        whole = np.memmap(path, np.uint8, "r+")
        offset = self.ask(do="offset")
        self.memory = whole[offset : offset + SIZE]
        """Its pages, as seen from here."""

    def ask(self, **command: Any) -> Any:
        """Have it do something."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if command:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def engine(self, role: str = "") -> Engine:
        """A new engine there, started if it is given a role; what was there before is destroyed."""
        engine = Engine(self, self.ask(do="engine"))
        if role:
            assert engine.initialize("tcp://127.0.0.1:0", "127.0.0.1:0", role, 0) == 0
        return engine

    def clean(self) -> None:
        """Destroy every engine there, and forget what the memory held."""
        self.ask(do="clean")
        self.memory[:] = 0

    def stop(self) -> None:
        """Stop it; returns when it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Engine:
    """An engine in such a process: call its methods."""

    def __init__(self, process: Process, number: int) -> None:
        self._process = process
        self._number = number

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            return self._process.ask(do="call", engine=self._number, name=name, arguments=arguments)

        return call

    def at_once(self, apart: float, *calls: tuple[Any, ...]) -> list[tuple[Any, float]]:
        """Calls, each a name and its arguments, in threads that begin ``apart`` seconds after one another.

        Returns what came of each, and the seconds that it took.
        """
        made = [{"engine": self._number, "name": name, "arguments": arguments} for name, *arguments in calls]
        return [(each, seconds) for each, seconds in self._process.ask(do="threads", calls=made, apart=apart)]

    @property
    def session(self) -> str:
        """Where others reach it."""
        return f"127.0.0.1:{self.get_rpc_port()}"

    @property
    def text(self) -> str:
        """The last error there, taken."""
        return str(self._process.ask(do="text"))

    def ticks(self, name: str, *arguments: Any) -> tuple[Any, int, float]:
        """A call, how often another thread ran meanwhile, and the seconds that it took."""
        found = self._process.ask(do="ticks", engine=self._number, name=name, arguments=arguments)
        return found[0], found[1], found[2]


def serve(path: str) -> None:
    """Be that process."""
    import memfabric_hybrid as library

    whole = np.memmap(path, np.uint8, "r+")
    offset = -whole.ctypes.data % PAGE
    engines: list[Any] = []

    def call(command: dict[str, Any]) -> Any:
        return getattr(engines[command["engine"]], command["name"])(*command["arguments"])

    def ticks(command: dict[str, Any]) -> Any:
        count, ended = [0], threading.Event()

        def tick() -> None:
            while not ended.wait(0.001):
                count[0] += 1

        thread = threading.Thread(target=tick)
        thread.start()
        start = time.monotonic()
        answer = call(command)
        taken = time.monotonic() - start
        ended.set()
        thread.join()
        return answer, count[0], taken

    def threads(command: dict[str, Any]) -> Any:
        """Calls in threads of their own, each begun a while after the one before: results and seconds."""
        found: list[Any] = [None] * len(command["calls"])

        def run(number: int) -> None:
            start = time.monotonic()
            answer = call(command["calls"][number])
            found[number] = [answer, time.monotonic() - start]

        made = [threading.Thread(target=run, args=(number,)) for number in range(len(found))]
        for thread in made:
            thread.start()
            time.sleep(command["apart"])
        for thread in made:
            thread.join()
        return found

    def clean() -> None:
        for engine in engines:
            engine.destroy()
        library.get_and_clear_last_err_msg()

    # The library writes its log to standard output, whatever its level: answers go another way.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(f"{path}.log", os.O_CREAT | os.O_WRONLY), 1)

    print(json.dumps(whole.ctypes.data + offset), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer: Any
        match command["do"]:
            case "offset":
                answer = offset
            case "engine":
                engines.append(library.TransferEngine())
                answer = len(engines) - 1
            case "call":
                answer = call(command)
            case "ticks":
                answer = ticks(command)
            case "threads":
                answer = threads(command)
            case "text":
                answer = library.get_and_clear_last_err_msg()
            case "clean":
                clean()
                answer = None
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
