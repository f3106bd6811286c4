"""What MoRI needs and a machine may lack, found without MoRI.

Its own ways of saying so end the process: creating its RDMA transport where ROCm reports no GPU, for one.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["active_ports", "gpus", "missing"]

ROCM = Path(os.environ.get("ROCM_PATH", "/opt/rocm"))
KFD = Path("/dev/kfd")
NODES = Path("/sys/class/kfd/kfd/topology/nodes")
INFINIBAND = Path("/sys/class/infiniband")


def missing(transport: str) -> Iterator[str]:
    """Everything that ``transport`` needs and is not here, each as a clause."""
    if importlib.util.find_spec("mori") is None:
        yield "the Python package mori is not installed (it is on no package index: build it from ROCm/mori)"
    if importlib.util.find_spec("torch") is None:
        yield "the Python package torch is not installed, and mori imports it"
    libraries = ["librocm_smi64.so", "libamdhip64.so", *(["libibverbs.so.1"] if transport == "rdma" else [])]
    yield from (f"{library} cannot be loaded" for library in libraries if not _loads(library))
    if not KFD.exists():
        yield f"there is no {KFD}: no AMD GPU, or its driver is not loaded or not visible here"
    found, needed = len(gpus()), 1 if transport == "rdma" else 2
    if found < needed:
        memory = " (for host memory, too)" if transport == "rdma" else ""
        yield f"{transport} needs {needed} AMD GPU{'s' if needed > 1 else ''}{memory}, and the driver lists {found}"
    if transport == "rdma" and not active_ports():
        yield f"no RDMA port in {INFINIBAND} is active"


def gpus() -> list[str]:
    """Nodes of the driver's topology that are GPUs; CPUs have the GPU id 0."""
    nodes = sorted(NODES.glob("*/gpu_id"))
    return [node.parent.name for node in nodes if _text(node) not in ("", "0")]


def active_ports() -> list[str]:
    """RDMA ports that are up, as ``device/port``."""
    states = sorted(INFINIBAND.glob("*/ports/*/state"))
    return [f"{state.parts[-4]}/{state.parts[-2]}" for state in states if _text(state).endswith("ACTIVE")]


def _loads(name: str) -> bool:
    """Whether the loader loads a library; asked in another process, which it may end as it likes."""
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    tries = ([sys.executable, "-c", code, place] for place in (name, str(ROCM / "lib" / name)))
    return any(subprocess.run(each, capture_output=True, check=False, timeout=60).returncode == 0 for each in tries)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
