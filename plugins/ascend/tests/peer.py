"""A process with one backend, driven over its standard input, whose memory the tests can see.

Run as a program, it is that process: ``peer.py <settings as JSON>``. It prints one line of JSON for each that it is
given. Its regions are an NPU's, or lie in a file that it shares with whoever started it; either way, a test looks at
bytes without asking the backend about them. No test imports MemFabric itself: where the library cannot run, these
processes find the simulator of it.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from statelink.backend import Backend, BackendContext, Batch, Blocks, Op, Outcome, Region
from statelink.errors import StatelinkError
from statelink.testing._device import serve as device
from statelink.testing._window import view
from statelink_ascend import AscendBackend

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


class Refused(Exception):
    """What the backend in a peer raised, with the name of its class in front."""


class Memory:
    """Regions side by side.

    Args:
        whole: All of it.
        sizes: Bytes of each region.
    """

    def __init__(self, whole: npt.NDArray[np.uint8], sizes: Sequence[int]) -> None:
        ends = np.cumsum(sizes).tolist()
        self.whole = whole[: ends[-1]]
        self.arrays = [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class Peer:
    """That process, seen from here; it has no backend until it is opened."""

    def __init__(
        self,
        folder: Path,
        sizes: Sequence[int],
        kind: str,
        environment: Mapping[str, str],
        allocator: str,
    ) -> None:
        folder.mkdir(parents=True)
        self.link = folder.name
        self.key = (tuple(sizes), kind)
        self.descriptor = b""
        path = folder / "memory"
        with path.open("wb") as file:
            file.truncate(sum(sizes))
        settings = {"path": str(path), "sizes": sizes, "kind": kind, "allocator": allocator}
        packages = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **packages, **environment},
        )
        self.regions: tuple[Region, ...] = ()

    def ready(self) -> Peer:
        """Wait until it is up; several can start at once."""
        if not self.regions:
            regions, served = self.answer()
            self.regions = tuple(msgspec.convert(regions, list[Region]))
            self.memory = Memory(view(served), self.key[0])
        return self

    def open(self, role: str, **options: Any) -> Peer:
        """Open its backend, and register all its regions."""
        self.start(role, **options)
        self.ask(do="register")
        self.descriptor = base64.b64decode(self.ask(do="descriptor"))
        return self

    def start(self, role: str, **options: Any) -> None:
        """The first part of that."""
        self.ask(do="open", link=self.link, role=role, options=options)

    def connect(self, other: Peer) -> Peer:
        """Connect its backend to another's."""
        self.meet(other.link, other.descriptor, other.regions)
        return self

    def meet(self, link: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        """The same, with whatever descriptor."""
        self.ask(**order(link, descriptor, regions))

    def connect_at_once(self, *others: Peer) -> list[tuple[str, float]]:
        """Connect it to several, in threads: what each refusal says, or nothing, and how long it took."""
        orders = [order(other.link, other.descriptor, other.regions) for other in others]
        return [(refused or "", seconds) for refused, seconds in self.ask(do="at once", orders=orders)]

    def move(self, other: Peer | str, blocks: Blocks, op: Op = Op.WRITE) -> list[Outcome]:
        """Move blocks as the core does, cut to the backend's limits; ends with the first that fails."""
        link = other if isinstance(other, str) else other.link
        columns = [getattr(blocks, name).tolist() for name in blocks.__slots__]
        return [Outcome(*each) for each in self.ask(do="move", peer=link, op=op.value, blocks=columns)]

    def block(self, other: Peer, nbytes: int = 100, region: int = 0, offset: int = 0) -> Blocks:
        """One block from the start of its first region to a place in a region of the other."""
        one, zero = np.ones(1, np.uint64), np.zeros(1, np.uint32)
        start = one * np.uint64(self.regions[0].address)
        goal = one * np.uint64(other.regions[region].address + offset)
        return Blocks(start, goal, one * np.uint64(nbytes), zero, zero + np.uint32(region))

    def serves(self, other: Peer) -> None:
        """A small write arrives whole."""
        self.memory.arrays[0][:100] = np.asarray(self.memory.arrays[0][:100]) + np.uint8(1)
        assert self.move(other, self.block(other)) == [(True, "", True)]
        assert np.array_equal(other.memory.arrays[0][:100], self.memory.arrays[0][:100])

    def ask(self, **command: Any) -> Any:
        """Have it do something."""
        self.tell(**command)
        return self.answer()

    def tell(self, **command: Any) -> None:
        """The first half of that."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The second half."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.link} ended with {self.process.wait(10)}"
        answer = json.loads(line)
        if isinstance(answer, dict):
            raise Refused(answer["error"])
        return answer

    def clean(self) -> bool:
        """Forget what a test did with it; whether it can be used again."""
        if self.process.poll() is not None or self.process.stdin is None or self.process.stdin.closed:
            return False
        self.process.send_signal(signal.SIGCONT)
        self.ask(do="clean")
        self.memory.whole[:] = 0
        self.descriptor = b""
        return True

    def stop(self) -> None:
        """Stop it; returns when it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def end(self) -> int:
        """Let it end by itself: its exit status."""
        self.process.communicate(timeout=30)
        return self.process.returncode

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def order(link: str, descriptor: bytes, regions: Sequence[Region]) -> dict[str, Any]:
    """The command to connect to a peer."""
    raw = base64.b64encode(descriptor).decode()
    return {"do": "connect", "peer": link, "descriptor": raw, "regions": msgspec.to_builtins(regions)}


def serve(settings: dict[str, Any]) -> None:
    """Be that process."""
    kind, served = settings["kind"], settings["path"]
    host = view(served)
    address = host.ctypes.data
    if kind != "dram":
        held, served = device(kind, settings["allocator"], served)
        address = held.address
    starts = (np.cumsum(settings["sizes"]) - settings["sizes"]).tolist()
    regions = [Region(address + at, size, kind) for at, size in zip(starts, settings["sizes"], strict=True)]
    backends: list[Backend] = []
    print(json.dumps([msgspec.to_builtins(regions), served]), flush=True)
    for line in sys.stdin:
        try:
            answer = obey(regions, backends, json.loads(line))
        except StatelinkError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def obey(regions: Sequence[Region], backends: list[Backend], command: dict[str, Any]) -> Any:
    """Do one thing; the last backend that was opened does it."""
    if command["do"] == "open":
        options = msgspec.convert(command["options"], AscendBackend.Options)
        backends.append(AscendBackend(BackendContext(options=options, link=command["link"], role=command["role"])))
        return None
    if command["do"] == "set":
        os.environ[command["name"]] = command["value"]
        return None
    if command["do"] == "clean":
        for each in backends:
            each.close()
        for name in ("MEMFABRIC_SIM_NPU", "MEMFABRIC_SIM_FAIL_AFTER"):
            os.environ.pop(name, None)
        return None
    if command["do"] == "at once":
        with ThreadPoolExecutor(len(command["orders"])) as threads:
            return list(threads.map(partial(said, regions, backends), command["orders"]))
    backend = backends[-1]
    if command["do"] == "register":
        backend.register(msgspec.convert(command.get("regions"), list[Region] | None) or regions)
    elif command["do"] == "descriptor":
        return base64.b64encode(backend.descriptor()).decode()
    elif command["do"] == "connect":
        theirs = msgspec.convert(command["regions"], list[Region])
        backend.connect(command["peer"], base64.b64decode(command["descriptor"]), theirs)
    elif command["do"] == "move":
        source, target, nbytes = (np.array(each, np.uint64) for each in command["blocks"][:3])
        blocks = Blocks(source, target, nbytes, *(np.array(each, np.uint32) for each in command["blocks"][3:]))
        return moved(backend, command["peer"], Op(command["op"]), blocks)
    elif command["do"] == "disconnect":
        backend.disconnect(command["peer"])
    elif command["do"] == "close":
        backend.close()
    return None


def said(regions: Sequence[Region], backends: list[Backend], command: dict[str, Any]) -> list[Any]:
    """What one of several answers, and the seconds that it took."""
    start = time.monotonic()
    try:
        answer = obey(regions, backends, command)
    except StatelinkError as error:
        answer = f"{type(error).__name__}: {error}"
    return [answer, time.monotonic() - start]


def moved(backend: Backend, peer: str, op: Op, blocks: Blocks) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for piece in blocks.slices(backend.capabilities.max_blocks, backend.capabilities.max_bytes):
        transfer = backend.submit(peer, Batch(op, piece, 1, 1))
        backend.poll([transfer])
        assert transfer.outcome is not None
        outcomes.append(transfer.outcome)
        if not transfer.outcome.ok:
            break
    return outcomes


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
