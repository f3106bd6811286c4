"""A process with one backend, driven over its standard input, whose memory the tests can see.

Run as a program, it is that process: ``peer.py <settings as JSON>``. It prints one line of JSON for each that it is
given. Its regions lie in files that it shares with whoever started it, so that a test looks at bytes without asking
the backend about them. No test imports MemFabric itself: where the library cannot run, these processes find the
simulator of it.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from statelink.backend import Backend, BackendContext, Batch, Blocks, Op, Outcome, Region
from statelink.errors import StatelinkError
from statelink_ascend import AscendBackend

MIB = 1 << 20


class Refused(Exception):
    """What the backend in a peer raised, with the name of its class in front."""


class Memory:
    """Regions in one shared file, side by side.

    Args:
        folder: Where it lies. The simulated NPU's memory is what lies in files whose names begin with ``npu``.
        sizes: Bytes of each region.
        kind: Kind of the memory.
    """

    def __init__(self, folder: Path, sizes: Sequence[int], kind: str) -> None:
        path = folder / f"{kind.partition(':')[0]}-memory"
        if not path.exists():
            with path.open("wb") as file:
                file.truncate(sum(sizes))
        self.whole: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, "r+")
        self.arrays = np.split(self.whole, np.cumsum(sizes)[:-1])
        self.regions = tuple(Region(array.ctypes.data, len(array), kind) for array in self.arrays)


class Peer:
    """That process, seen from here; it has no backend until it is opened."""

    def __init__(
        self,
        folder: Path,
        sizes: Sequence[int],
        kind: str,
        environment: Mapping[str, str],
    ) -> None:
        folder.mkdir(parents=True)
        self.link = folder.name
        self.key = (tuple(sizes), kind)
        self.memory = Memory(folder, sizes, kind)
        self.descriptor = b""
        settings = {"folder": str(folder), "sizes": sizes, "kind": kind}
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **path, **environment},
        )
        self.regions: tuple[Region, ...] = ()

    def ready(self) -> Peer:
        """Wait until it is up; several can start at once."""
        if not self.regions:
            self.regions = tuple(msgspec.convert(self.answer(), list[Region]))
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
        raw = base64.b64encode(descriptor).decode()
        self.ask(do="connect", peer=link, descriptor=raw, regions=msgspec.to_builtins(regions))

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
        self.memory.arrays[0][:100] += 1
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


def serve(settings: dict[str, Any]) -> None:
    """Be that process."""
    memory = Memory(Path(settings["folder"]), settings["sizes"], settings["kind"])
    backends: list[Backend] = []
    print(json.dumps(msgspec.to_builtins(memory.regions)), flush=True)
    for line in sys.stdin:
        try:
            answer = obey(memory, backends, json.loads(line))
        except StatelinkError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def obey(memory: Memory, backends: list[Backend], command: dict[str, Any]) -> Any:
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
    backend = backends[-1]
    if command["do"] == "register":
        backend.register(msgspec.convert(command.get("regions"), list[Region] | None) or memory.regions)
    elif command["do"] == "descriptor":
        return base64.b64encode(backend.descriptor()).decode()
    elif command["do"] == "connect":
        regions = msgspec.convert(command["regions"], list[Region])
        backend.connect(command["peer"], base64.b64decode(command["descriptor"]), regions)
    elif command["do"] == "move":
        source, target, nbytes = (np.array(each, np.uint64) for each in command["blocks"][:3])
        blocks = Blocks(source, target, nbytes, *(np.array(each, np.uint32) for each in command["blocks"][3:]))
        return moved(backend, command["peer"], Op(command["op"]), blocks)
    elif command["do"] == "disconnect":
        backend.disconnect(command["peer"])
    elif command["do"] == "close":
        backend.close()
    return None


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
