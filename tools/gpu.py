"""Runs everything that needs a graphics card, in parts of less than ten minutes each. Needs no network.

    python -m tools.gpu [--part NAME ...] [--list] [--out build/gpu]

Each part's output goes to a file. Without a card that torch reaches, it says what it would run, and ends well. It ends
with an error if a part failed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
LIMIT = 600
DEVICE = "cuda:0"
BACKENDS = ("nixl", "mooncake")


TESTS = "python -m pytest -q -p no:cacheprovider"


class Part(NamedTuple):
    """A command, and what it shows."""

    what: str
    command: str


def bench(name: str, backend: str, more: str) -> str:
    """A benchmark's command over memory of the card."""
    return f"python -m benchmarks.{name} --backend {backend} --memory {DEVICE} --rounds 30 {more}"


PARTS = {
    "pointers": Part("pointers of the card's driver", f"{TESTS} tests/pointers"),
    "staging": Part("gathering and scattering on the card", f"{TESTS} tests/model -k staging"),
    **{
        f"kit-{backend}": Part(
            f"the contract of {backend} over the card's memory",
            f"statelink conform {backend} --memory {DEVICE} --require",
        )
        for backend in BACKENDS
    },
    **{
        f"{workload}-{backend}": Part(
            f"workload {workload} over {backend}, against a copy on the card",
            bench("handoff", backend, f"--workload {workload}"),
        )
        for backend in BACKENDS
        for workload in "ABC"
    },
    **{
        f"D-{backend}": Part(f"workload D over {backend}", bench("unequal", backend, "--dim 128"))
        for backend in BACKENDS
    },
    "demo": Part("the demo over nixl", "statelink demo --backend nixl"),
}


def card() -> str:
    """The card's name; empty if torch reaches none."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return ""
    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else ""


def run(name: str, part: Part, out: Path) -> int:
    """Run a part; its exit status, which is 124 if it took too long."""
    began = time.monotonic()
    with open(out / f"{name}.txt", "w") as file:
        try:
            done = subprocess.run(
                [sys.executable, *part.command],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=LIMIT,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            done = 124
    print(f"{name}: {'passed' if done == 0 else f'exit status {done}'}, {time.monotonic() - began:.0f} s", flush=True)
    if done:
        print("".join((out / f"{name}.txt").read_text().splitlines(keepends=True)[-20:]))
    return done


def main() -> int:
    """Parse arguments, and run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="only say what would be run")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    arguments = parser.parse_args()
    found = card()
    if arguments.list or not found:
        print("torch reaches no graphics card here. With one, these parts would run:" if not found else "The parts:")
        table = Table("part", "what it shows", "command")
        for name in arguments.part:
            table.add_row(name, PARTS[name].what, PARTS[name].command)
        Console(width=200 if not os.isatty(1) else None).print(table)
        return 0
    print(f"on {found}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = [name for name in arguments.part if run(name, PARTS[name], arguments.out)]
    print(f"failed: {', '.join(failed)}" if failed else "every part passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
