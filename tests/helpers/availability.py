"""Whether a backend can run on this machine, asked in a process of its own."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from statelink.config import read_options
from statelink.errors import StatelinkError
from statelink.registry import load_backend

PLUGINS = Path(__file__).parents[2] / "plugins"
SIMULATED = frozenset({"ascend", "mori"})
"""Backends whose library has a simulator."""
OPTIONS: dict[str, dict[str, str]] = {
    # Its default moves an NPU's.
    "ascend": {"data_op_type": "HOST_RDMA", "nic": os.environ.get("STATELINK_ASCEND_NIC", "tcp://127.0.0.1:10002")}
}
"""Options with which a backend moves host memory."""


def environment_of(backend: str, memory: str = "dram") -> dict[str, str]:
    """What a process needs in its environment to find the backend's library, or where that cannot run its simulator.

    Args:
        backend: Its name.
        memory: Kind of the memory that it is to move: the library may be able to move one and not another.
    """
    if backend not in SIMULATED or not problem_of(backend, memory):
        return {}
    return {"PYTHONPATH": os.pathsep.join([str(PLUGINS / backend / "simulator"), *filter(None, sys.path)])}


def options_of(backend: str, memory: str = "dram") -> dict[str, str]:
    """Options with which a backend moves memory of a kind."""
    return OPTIONS.get(backend, {}) if memory == "dram" else {}


@functools.cache
def problem_of(backend: str, memory: str = "dram") -> str:
    """Why it cannot run here, with the options that such memory needs; empty if it can."""
    code = f"from {__name__} import look; look({backend!r}, {memory!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    return "" if done.returncode == 0 else (done.stdout.strip() or done.stderr[-2000:].strip() or str(done.returncode))


def look(name: str, memory: str) -> None:
    """End this process, with that said, if it cannot run."""
    try:
        chosen = load_backend(name)
        probe = chosen.probe(read_options(chosen.Options, options_of(name, memory), "options of the tests"))
        problem = "" if probe.ok else f"{probe.reason}\nhint: {probe.hint}"
    except StatelinkError as error:
        problem = str(error)
    if problem:
        print(problem)
        sys.exit(1)
