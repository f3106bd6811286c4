"""Finds what MoRI needs and a machine lacks, and starts MoRI in a process of its own, which it may end."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from statelink.backend import Check, Verdict
from statelink.backend.native import elsewhere, loads, needs, on_machine, rdma_devices, settings

if TYPE_CHECKING:
    from ._options import Options

__all__ = ["POLL_MODE", "active_ports", "diagnose", "gpus", "harm", "hint", "missing", "trial", "what_is_tried"]

ROCM = Path(os.environ.get("ROCM_PATH", "/opt/rocm"))
KFD, NODES = "/dev/kfd", "/sys/class/kfd/kfd/topology/nodes"
PATIENCE = 120.0
POLL_MODE = "MORI_IO_POLL_CQ_MODE"
HARMFUL = {
    "MORI_IO_ENABLE_NOTIFICATION": (
        ("0", "false", "off"),
        "wins over this plugin: the library then keeps a note of every transfer for ever",
    ),
    POLL_MODE: (
        ("0", "polling"),
        "wins over this plugin: the library then closes file descriptor 0, and whoever holds it next",
    ),
}
"""Environment variable to its harmless values, and to the effect of others."""
ABSENT = "the Python package mori is not installed (its distribution is amd-mori, with wheels for CPython 3.10)"
INSTALL = "pip install 'statelink-mori[rocm]' with CPython 3.10 and ROCm 7 beside it, or choose another backend"
BINDING = "libmori_pybinds.so"
LOADED_LATER = ("librocm_smi64.so.1", "libibverbs.so.1")
"""Libraries that RDMA opens when it starts. In some releases, the loader needs them, too."""
TRIAL = """
import os, sys, msgspec
from statelink.errors import BackendUnavailableError
from statelink_mori import Options
from statelink_mori._library import Engine, Library
library = Library()
try:
    Engine(library, "trial", "127.0.0.1", msgspec.json.decode(sys.argv[1], type=Options), port=0)
except BackendUnavailableError as error:
    print(error.reason.cause, file=sys.stderr, flush=True)
    os._exit(1)
print(library.version, flush=True)
os._exit(0)  # what the library would do to end its threads goes with the process
"""


def missing(options: Options) -> Iterator[str]:
    """Everything that the transports need and that is missing here, each as a clause."""
    rdma, xgmi = "RDMA" in options.backends, "XGMI" in options.backends
    for package, why in (("mori", ABSENT), ("torch", "the Python package torch is not installed, and mori imports it")):
        if importlib.util.find_spec(package) is None:
            yield why
    absent = dict.fromkeys(not_found())
    later = LOADED_LATER if rdma else ()
    absent |= dict.fromkeys(name for name in later if not any(loads(str(place / name)) for place in places()))
    yield from (f"{name} cannot be loaded" for name in absent)
    found, needed = len(gpus()), 2 if xgmi else int(rdma)
    if needed and not on_machine(KFD).exists():
        yield f"there is no {on_machine(KFD)}: no AMD GPU, or its driver is not loaded or not visible here"
    if found < needed:
        what = "XGMI needs 2 AMD GPUs" if xgmi else "RDMA needs an AMD GPU (for host memory, too)"
        yield f"{what}, and the driver lists {found}"
    if rdma and not active_ports():
        yield "no RDMA port is active"


def places() -> list[Path]:
    """Where MoRI's libraries look for others: where the loader does, beside themselves, and in ROCm."""
    found = importlib.util.find_spec("mori")
    return [Path(), *map(Path, (found and found.submodule_search_locations) or ()), ROCM / "lib"]


def not_found() -> list[str]:
    """Shared libraries that the loader does not find for MoRI's. MoRI's own files say which they need."""
    bindings = [place / BINDING for place in places() if (place / BINDING).exists()]
    if not bindings:  # MoRI is not installed
        return []
    told = subprocess.run(["ldd", bindings[0]], capture_output=True, text=True, check=False).stdout
    return re.findall(r"^\s*(\S+) => not found$", told, re.MULTILINE)


def diagnose(options: Options) -> Iterator[Check]:
    """See `statelink.backend.Diagnosing`.

    XGMI starts without a GPU and then moves nothing. Only this check finds it.
    """
    yield from needs(missing(options), f"all that {' and '.join(options.backends)} needs; GPUs: {len(gpus())}")
    found = {name: said for name in HARMFUL if (said := harm(name))}
    for name, said in found.items():
        yield Check(what="environment", verdict=Verdict.PROBLEM, found=said, hint=f"unset {name}")
    if not found:
        yield settings("MORI_")


def harm(name: str) -> str:
    """The harm that an environment variable does with its value; empty for none."""
    harmless, does = HARMFUL[name]
    value = os.environ.get(name, "0")
    return "" if value.lower() in harmless else f"{name}={value} {does}"


def what_is_tried(options: Options) -> bytes:
    """Everything on which the result of a trial depends: the options, the MoRI that is found, and its variables."""
    found = importlib.util.find_spec("mori")
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith("MORI_"))
    return msgspec.json.encode((options, found and found.origin, variables))


def hint() -> str:
    """What to do where MoRI does not start."""
    return INSTALL if importlib.util.find_spec("mori") is None else "choose another backend"


def trial(options: Options) -> tuple[bool, str]:
    """Whether an engine starts with these options: the library's version, or what was said last."""
    if importlib.util.find_spec("mori") is None:
        return False, "MoRI is not installed"
    done = elsewhere(TRIAL, msgspec.json.encode(options).decode(), patience=PATIENCE)
    good = done.status == 0
    return good, done.last if good else f"MoRI does not start here: {done.last} ({done.how})"


def gpus() -> list[str]:
    """Nodes of the driver's topology that are GPUs; CPUs have the GPU id 0."""
    found = []
    for node in sorted(on_machine(NODES).glob("*/gpu_id")):
        with contextlib.suppress(OSError):  # a GPU that this container may not use
            found += [node.parent.name] * (node.read_text().strip() not in ("", "0"))
    return found


def active_ports() -> list[str]:
    """RDMA ports that are up, as ``device/port``."""
    return [f"{device}/{port}" for device, ports in rdma_devices().items() for port in ports]
