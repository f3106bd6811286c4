"""Settings of allocators, and limits of the process, that decide whether memory can be registered."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path

__all__ = ["LOCKED", "POOLED", "SEGMENTS", "lockable", "pinned", "segments", "setting"]

LOCKED = "ulimit -l unlimited (limits.conf: memlock); LimitMEMLOCK=infinity; docker run --ulimit memlock=-1"
"""How to lift the limit on locked memory."""
SEGMENTS = ("expandable_segments", "true")
POOLED = ("backend", "cudamallocasync")
# From version 2.9 on, torch reads the first one for every device. The others are older, and common.
VARIABLES = {
    "cuda": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    "npu": ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
}
STATUS = Path("/proc/self/status")
MAY_LOCK = 14
"""Number of the capability CAP_IPC_LOCK. The limit does not apply to processes that have it."""


def setting(family: str, wanted: tuple[str, str], environment: Mapping[str, str] | None = None) -> str:
    """The variable that sets an option of torch's allocator to this value; empty if none does.

    Args:
        family: Memory kind without the device's number.
        wanted: The option, and its value in lower case.
        environment: The environment; the process's own by default.
    """
    environment = os.environ if environment is None else environment
    for variable in VARIABLES.get(family, ()):
        for part in environment.get(variable, "").split(","):
            option, _, value = part.partition(":")
            if (option.strip(), value.strip().lower()) == wanted:
                return variable
    return ""


def variable(family: str) -> str:
    """The variable that is best known, for a hint."""
    return VARIABLES[family][0]


def segments(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Memory kinds, without numbers, for which torch uses expandable segments, and the variable that says so."""
    found = {family: setting(family, SEGMENTS, environment) for family in VARIABLES}
    return {family: name for family, name in found.items() if name}


def pinned(status: Path = STATUS) -> int:
    """Bytes of memory that devices hold in this process; 0 where that cannot be told."""
    try:
        held = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmPin:"))
        return int(held) << 10
    except (OSError, StopIteration, IndexError, ValueError):
        return 0


def lockable(status: Path = STATUS) -> int:
    """Bytes of memory that this process may lock; -1 for any number."""
    most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if most == resource.RLIM_INFINITY:
        return -1
    try:
        lines = status.read_text().splitlines()
        effective = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    except (OSError, StopIteration, ValueError):
        return most
    return -1 if effective >> MAY_LOCK & 1 else most
