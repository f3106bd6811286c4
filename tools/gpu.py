"""Runs everything that needs a graphics card, in parts of less than ten minutes each. Needs no network.

    python -m tools.gpu [--quick] [--part NAME ...] [--list] [--out build/gpu] [--seconds 480]

Without CUDA's driver, it says what it would run, and ends well. It ends with an error if a part failed. Every part has
a limit of its own, and all of them together may have ``--seconds``. A part that fails or takes too long does not keep
the next one from running. Two files are written: ``gpu.jsonl`` has every answer as one line of JSON, and ``gpu.txt``
has the answers and what each part printed, the logs of NIXL and UCX among it.

With ``--quick``, the parts are questions: see `tools.card`. The first two minutes say whether UCX's modules for CUDA
load, whether the order of streams is kept, and which transport carries the bytes. They have 480 seconds together,
unless ``--seconds`` says otherwise, and the files are ``quick.jsonl`` and ``quick.txt``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from .card.say import FILE

ROOT = Path(__file__).parents[1]
LIMIT = 600
DEVICE = "cuda:0"
BACKENDS = ("nixl", "mooncake")
LEAST = 5.0
"""Seconds that must be left for another part of ``--quick`` to begin."""
DRIVER = "libcuda.so.1"
RUN = "STATELINK_GPU_PART"
KEPT = 1 << 19
"""Bytes of a part's output that are kept: its first half and its last half."""


class Part(NamedTuple):
    """A command, and what it shows.

    Attributes:
        what: What it shows.
        command: Words after the interpreter.
        limit: Seconds after which it is ended.
    """

    what: str
    command: tuple[str, ...]
    limit: int = LIMIT


def tests(*words: str) -> tuple[str, ...]:
    """A command that runs tests."""
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", *words)


def statelink(*words: str) -> tuple[str, ...]:
    """A command that runs ``statelink``, wherever that is installed."""
    return ("-c", "from statelink.cli import main; main()", *words)


def bench(name: str, backend: str, *more: str, rounds: int = 30) -> tuple[str, ...]:
    """A benchmark's command over memory of the card."""
    words = ("--backend", backend, "--memory", DEVICE, "--rounds", str(rounds))
    return ("-m", f"benchmarks.{name}", *words, *more)


def card_part(name: str, *words: str) -> tuple[str, ...]:
    """A command that asks one question of `tools.card`."""
    return ("-m", f"tools.card.{name}", *words)


def over_card(*words: str) -> tuple[str, ...]:
    """A command of ``statelink`` over memory of the card, which the driver allocates: torch may not be there."""
    return statelink(*words, "--memory", DEVICE, "--allocator", "tools.card.allocator:Memory")


def clauses(expression: str, *words: str) -> tuple[str, ...]:
    """A command that runs clauses of the kit over memory of the card."""
    return over_card("conform", "nixl", "--require", "-k", expression, *words)


LAYERS = Part(
    "layers that leave while kernels run: the forward pass, and what is left after it", card_part("layers"), 90
)

PARTS = {
    "pointers": Part("pointers of the card's driver", tests("tests/pointers")),
    "staging": Part("gathering and scattering on the card", tests("tests/model/test_staging_memory.py")),
    "layers": LAYERS,
    **{
        f"kit-{backend}": Part(
            f"the contract of {backend} over the card's memory",
            statelink("conform", backend, "--memory", DEVICE, "--require"),
        )
        for backend in BACKENDS
    },
    **{
        f"{workload}-{backend}": Part(
            f"workload {workload} over {backend}, against a copy on the card",
            bench("handoff", backend, "--workload", workload),
        )
        for backend in BACKENDS
        for workload in "ABC"
    },
    **{
        f"D-{backend}": Part(f"workload D over {backend}", bench("unequal", backend, "--dim", "128"))
        for backend in BACKENDS
    },
    "demo": Part("the demo over nixl", statelink("demo", "--backend", "nixl")),
}

OVER_TCP = 'ucx={"TLS": "tcp,cuda_copy"}'
PIECES = 'ucx={"TCP_TX_SEG_SIZE": "512k", "TCP_RX_SEG_SIZE": "512k"}'
"""UCX copies from or to a card in pieces of this size where it moves them over TCP: 8 KiB, unless it is told so."""
SHORT = ("--mib", "64", "--rounds", "3")

QUICK = {
    "doctor": Part("what `statelink doctor` says", over_card("doctor", "nixl"), 60),
    "order": Part("is the order of streams kept", card_part("order", "--rooms", "10"), 90),
    "cuda-cuda": Part("card to card: which transport, GB/s", card_part("link", "cuda", "cuda"), 60),
    "tests": Part(
        "the tests that need a card", tests("-W", "default", "tests/pointers", "tests/model/test_staging_memory.py"), 60
    ),
    "layers": LAYERS,
    "cuda-dram": Part("card to host", card_part("link", "cuda", "dram", *SHORT), 60),
    "dram-cuda": Part("host to card", card_part("link", "dram", "cuda", *SHORT), 60),
    "small-blocks": Part(
        "card to card in blocks of 1 KiB", card_part("link", "cuda", "cuda", "--mib", "16", "--page-kib", "1"), 45
    ),
    "over-tcp": Part(
        "card to card where UCX may only use TCP",
        card_part("link", "cuda", "cuda", "-o", OVER_TCP, *SHORT),
        45,
    ),
    "threads-8": Part(
        "card to card with eight threads that post", card_part("link", "cuda", "cuda", "-o", "num_threads=8"), 60
    ),
    "cuda-dram-pieces": Part(
        "card to host, over TCP in large pieces", card_part("link", "cuda", "dram", "-o", PIECES, *SHORT), 45
    ),
    "dram-cuda-pieces": Part(
        "host to card, over TCP in large pieces", card_part("link", "dram", "cuda", "-o", PIECES, *SHORT), 45
    ),
    "segments": Part(
        "card to card in expandable segments",
        card_part("link", "cuda", "cuda", "--allocator", "expandable_segments:True", *SHORT),
        45,
    ),
    "pool": Part(
        "card to card in memory of a pool",
        card_part("link", "cuda", "cuda", "--allocator", "backend:cudaMallocAsync", *SHORT),
        45,
    ),
    "staged": Part("card to card through staging rings", card_part("link", "cuda", "cuda", "--staged"), 60),
    "A": Part("workload A", bench("handoff", "nixl", "--workload", "A", "--json", rounds=10), 45),
    "C": Part("workload C", bench("handoff", "nixl", "--workload", "C", "--json", rounds=10), 60),
    "D": Part("workload D, staged and direct", bench("unequal", "nixl", "--dim", "128", "--json", rounds=5), 60),
    "kit-moving": Part("clauses of the kit", clauses("Moving or Stalling or Registration"), 90),
    "kit-dying": Part("clauses of the kit on processes that die", clauses("Dying"), 90),
    "kit-dying-tcp": Part(
        "a clause of the kit on processes that die, where UCX may only use TCP",
        clauses("test_memory_outlives_its_mover", "-o", OVER_TCP),
        60,
    ),
    "kit-states": Part("clauses of the kit on all types of state", clauses("States or Fencing"), 90),
}
"""In the order in which their answers are wanted."""


def driver() -> str:
    """Where CUDA's driver is; empty if it is nowhere. Starts no CUDA in this process."""
    try:
        ctypes.CDLL(DRIVER)
        return f"a machine with {DRIVER}"
    except OSError:
        return next((f"a machine with {DRIVER} in {place}" for place in places(DRIVER)), "")


def run(part: Part, log: Path, limit: float, environment: dict[str, str]) -> int:
    """Run a part; its exit status, which is 124 if it took too long. Then all of its processes are ended.

    Some of them may be in a session of their own: they are known by a variable of their environment.
    """
    mark = f"{RUN}={os.getpid()}-{time.monotonic_ns()}"
    # The processes that `statelink` starts find the allocator of `tools.card` here.
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *part.command],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**environment, RUN: mark.removeprefix(f"{RUN}="), "PYTHONPATH": path},
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            for each in marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            process.wait()


def marked(mark: str) -> list[int]:
    """The processes whose environment has this variable with this value."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def all_of(parts: dict[str, Part], names: list[str], out: Path, name_of_files: str, seconds: float) -> list[str]:
    """Run parts, all into two files, and print each answer when it is there. Returns those that failed."""
    ends, failed = time.monotonic() + seconds, []
    environment, told = prepared()
    answers, log = out / "answers.part", out / "log.part"
    environment[FILE] = str(answers)
    with (out / f"{name_of_files}.jsonl").open("w") as lines, (out / f"{name_of_files}.txt").open("w") as text:

        def say(part: str, what: str, value: object, unit: str = "") -> None:
            lines.write(json.dumps({"part": part, "what": what, "value": value, "unit": unit}) + "\n")
            lines.flush()
            text.write(line := f"{part}: {what}: {value}{f' {unit}' if unit else ''}\n")
            text.flush()
            print(line, end="", flush=True)

        for each in told:
            say("libraries", "on the loader's path", each)
        for name in names:
            part, began = parts[name], time.monotonic()
            left = ends - began
            if left < LEAST:
                say(name, "status", "not run: no time was left")
                failed.append(name)
                continue
            limit = min(part.limit, left)
            answers.write_text("")
            text.write(f"\n===== {name}: {part.what}: {shlex.join(part.command)}\n")
            text.flush()
            done = run(part, log, limit, environment)
            for each in answers.read_text().splitlines():
                say(name, **json.loads(each))
            printed = log.read_bytes()
            for line in printed.decode(errors="replace").splitlines():
                if line.startswith('{"workload"'):  # of a benchmark
                    say(name, "row", json.loads(line))
            status = (
                "passed" if done == 0 else f"ended after its {limit:.0f} s" if done == 124 else f"exit status {done}"
            )
            say(name, "status", status)
            say(name, "took", round(time.monotonic() - began), "s")
            text.write(f"----- what {name} printed\n{excerpt(printed)}\n")
            if done:
                failed.append(name)
                print(excerpt(printed, 2000), flush=True)
    answers.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    return failed


def excerpt(printed: bytes, most: int = KEPT) -> str:
    """The first and the last half of what a part printed, if it is too long."""
    if len(printed) > most:
        left = len(printed) - most
        printed = printed[: most // 2] + f"\n... {left} bytes are left out ...\n".encode() + printed[-most // 2 :]
    return printed.decode(errors="replace")


def prepared() -> tuple[dict[str, str], list[str]]:
    """The environment of the parts: libraries speak, and the loader finds CUDA's. Returns it, and what was added."""
    environment = {"NIXL_LOG_LEVEL": "INFO", "UCX_LOG_LEVEL": "info", "PYTHONUNBUFFERED": "1", **os.environ}
    added = [place for name in ("libcudart.so.13", "libnvidia-ml.so.1", DRIVER) for place in places(name)]
    if added:
        given = environment.get("LD_LIBRARY_PATH", "")
        environment["LD_LIBRARY_PATH"] = os.pathsep.join([*added, *([given] if given else [])])
    return environment, added


def places(library: str) -> list[str]:
    """Where a library is that the loader does not find by itself: one folder, or none."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(library)
        return []
    spec = importlib.util.find_spec("nvidia")
    inside = [Path(each) for each in (spec.submodule_search_locations or ())] if spec else []
    folders = [folder / "lib" for each in inside for folder in sorted(each.iterdir())]
    folders += [Path("/usr/local/nvidia/lib64"), Path("/usr/local/cuda/lib64"), Path("/usr/local/nvidia/lib")]
    return [str(folder) for folder in folders if (folder / library).exists()][:1]


def show(parts: dict[str, Part], names: list[str]) -> None:
    """Say what would be run."""
    table = Table("part", "what it shows", "command")
    for name in names:
        table.add_row(name, parts[name].what, shlex.join(("python", *parts[name].command)))
    Console(width=200 if not os.isatty(1) else None).print(table)


def main() -> int:
    """Parse arguments, and run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="ask the questions of a first run")
    parser.add_argument("--part", nargs="+", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="only say what would be run")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--seconds", type=float, help="for all parts together")
    arguments = parser.parse_args()
    parts = QUICK if arguments.quick else PARTS
    names = arguments.part or list(parts)
    if unknown := [name for name in names if name not in parts]:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(parts)}")
    found = driver()
    if arguments.list or not found:
        print("The parts:" if arguments.list else "there is no driver of CUDA here. With one, these parts would run:")
        show(parts, names)
        return 0
    print(f"on {found}", flush=True)
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    seconds = arguments.seconds or (480.0 if arguments.quick else float("inf"))
    failed = all_of(parts, names, out, "quick" if arguments.quick else "gpu", seconds)
    print(f"failed: {', '.join(failed)}" if failed else "every part passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
