"""What MoRI needs and a machine may lack, and a first start of MoRI in a process that it may end as it likes."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from ._options import Options

__all__ = ["active_ports", "gpus", "missing", "trial"]

ROCM = Path(os.environ.get("ROCM_PATH", "/opt/rocm"))
KFD = Path("/dev/kfd")
NODES = Path("/sys/class/kfd/kfd/topology/nodes")
INFINIBAND = Path("/sys/class/infiniband")
PATIENCE = 120.0
ABSENT = "the Python package mori is not installed (it is on no package index: build it from ROCm/mori)"
TRIAL = """
import sys, msgspec
from statelink.errors import BackendUnavailableError
from statelink_mori import Options
from statelink_mori._library import Engine, Library
library = Library()
try:
    Engine(library, "trial", "127.0.0.1", msgspec.json.decode(sys.argv[1], type=Options), port=0)
except BackendUnavailableError as error:
    sys.exit(error.reason.cause)
print(library.version, flush=True)
"""


def missing(options: Options) -> Iterator[str]:
    """Everything that the transports need and is not here, each as a clause."""
    rdma, xgmi = "RDMA" in options.backends, "XGMI" in options.backends
    if importlib.util.find_spec("mori") is None:
        yield ABSENT
    if importlib.util.find_spec("torch") is None:
        yield "the Python package torch is not installed, and mori imports it"
    libraries = ["libamdhip64.so", *(["librocm_smi64.so", "libibverbs.so.1"] if rdma else [])]
    yield from (f"{library} cannot be loaded" for library in libraries if not _loads(library))
    found, needed = len(gpus()), 2 if xgmi else int(rdma)
    if needed and not KFD.exists():
        yield f"there is no {KFD}: no AMD GPU, or its driver is not loaded or not visible here"
    if found < needed:
        what = "XGMI needs 2 AMD GPUs" if xgmi else "RDMA needs an AMD GPU (for host memory, too)"
        yield f"{what}, and the driver lists {found}"
    if rdma and not active_ports():
        yield f"no RDMA port in {INFINIBAND} is active"


def trial(options: Options) -> tuple[bool, str]:
    """Whether an engine starts with these options: the library's version, or what was said last."""
    if importlib.util.find_spec("mori") is None:
        return False, "MoRI is not installed"
    command = [sys.executable, "-c", TRIAL, msgspec.json.encode(options).decode()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=PATIENCE, env=environment
        )
    except subprocess.TimeoutExpired:
        return False, f"MoRI did not start within {PATIENCE:g} s"
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()] or ["no output"]
    if done.returncode == 0:
        return True, lines[-1]
    how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit status {done.returncode}"
    return False, f"MoRI does not start here: {lines[-1]} ({how})"


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
