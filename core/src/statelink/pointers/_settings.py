"""Hints for libraries that refuse memory because of the way in which it was allocated."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from statelink.errors import StatelinkError, TransferError, UnsupportedError

from ._allocators import LOCKED, POOLED, SEGMENTS, lockable, setting, variable
from ._check import family
from ._seen import Origin

if TYPE_CHECKING:
    from ._check import Checked
    from ._map import Mapping as Mapped

__all__ = ["device_settings", "hint_at_settings", "on_disk"]

FREE_OF_DISKS = ("/dev/shm/", "/dev/hugepages/", "/memfd:", "/SYSV", "/anon_hugepage", "/dev/zero", "/dev/mem")
"""Prefixes of names of mappings that are on no disk."""
MOUNTS = Path("/proc/self/mounts")
IN_MEMORY = frozenset({"tmpfs", "hugetlbfs", "devtmpfs", "ramfs"})
"""File systems without a disk, wherever they are mounted."""


@contextlib.contextmanager
def hint_at_settings(checked: Checked, **who: str) -> Iterator[None]:
    """Add a hint to the error of a backend that refuses memory: which setting or limit may be the reason.

    So the author of a backend need not know about allocators. The error keeps its class, its cause and its own hint.

    Args:
        checked: What is known about the memory.
        **who: Whom the error concerns, if it is none of Statelink's own.

    Raises:
        TransferError: The backend raised an error that is none of Statelink's own.
    """
    try:
        yield
    except UnsupportedError:  # the backend does not declare this, whatever the allocation
        raise
    except StatelinkError as error:
        hints = _settings(checked)
        if hints:
            error.reason = msgspec.structs.replace(error.reason, hint="; ".join(filter(None, (error.hint, *hints))))
            error.args = (str(error.reason),)
        raise
    except Exception as error:
        raise TransferError(
            "memory could not be registered",
            cause=f"{type(error).__name__}: {error}",
            hint="; ".join(_settings(checked)),
            **who,
        ) from error


def _settings(checked: Checked) -> list[str]:
    devices = device_settings(checked)
    if not devices:
        devices = [
            f"the driver says that no network card can reach memory of {kind}: is nvidia-peermem loaded?"
            for kind in sorted(checked.indirect)
        ]
    return [*devices, *_host(checked)]


def device_settings(checked: Checked, environment: Mapping[str, str] | None = None) -> list[str]:
    """Hints about allocators whose memory some libraries cannot register; empty for ordinary memory.

    The driver's answer counts more than the environment, because an engine may choose another allocator itself.

    Args:
        checked: What is known about the memory.
        environment: The environment; the process's own by default.
    """
    hints: list[str] = []
    for kind in dict.fromkeys(region.kind for region in checked.regions):
        hints.extend(_of_kind(kind, checked, os.environ if environment is None else environment))
    return hints


def _of_kind(kind: str, checked: Checked, environment: Mapping[str, str]) -> Iterator[str]:
    name = family(kind)
    origins = checked.origins.get(kind, Counter())
    untold = not origins or Origin.UNKNOWN in origins
    segmented, pooled = (setting(name, wanted, environment) for wanted in (SEGMENTS, POOLED))
    if Origin.VIRTUAL in origins or (segmented and untold):
        how, change = "in expandable segments", "expandable_segments:False"
        by = segmented or f"{variable(name)}; another allocator of virtual memory has to ask for gpuDirectRDMACapable"
    elif Origin.POOL in origins or (pooled and untold):
        how, change = "from a pool (cudaMallocAsync)", "backend:native"
        by = pooled or f"{variable(name)}; another allocator has to use cudaMalloc"
    else:
        return
    found = f"memory of {kind} is allocated {how}, which many libraries cannot register, or move slowly"
    yield f"{found}: set {change} in {by}"


def _host(checked: Checked) -> list[str]:
    hints = []
    host = [region for region in checked.regions if family(region.kind) == "dram"]
    nbytes, most = sum(region.nbytes for region in host), lockable()
    if 0 <= most < nbytes:
        hints.append(
            f"this process may lock {most >> 10} KiB (RLIMIT_MEMLOCK) and {nbytes >> 10} KiB are to be registered; "
            f"where the library locks memory: {LOCKED}"
        )
    if checked.platform.map is not None:
        mapped = {line for region in host for line in checked.platform.map.over(region.address, region.nbytes)}
        hints.extend(sorted({hint for hint in map(_mapped, mapped) if hint}))
    return hints


def _mapped(line: Mapped) -> str:
    if "w" not in line.permissions:
        return f"some of it is mapped for reading only ({line}): where the library wants to write, map it for writing"
    if on_disk(line):
        return f"some of it is mapped from {line.name}, and Linux locks no pages of files on disks: use /dev/shm"
    return ""


def on_disk(line: Mapped) -> bool:
    """Whether memory is a shared mapping of a file on a disk. Linux pins no pages of such files."""
    if "s" not in line.permissions or not line.name.startswith("/") or line.name.startswith(FREE_OF_DISKS):
        return False
    with contextlib.suppress(OSError):
        mounts = [words[1:3] for words in map(str.split, MOUNTS.read_text().splitlines()) if len(words) > 2]
        above = [(point, kind) for point, kind in mounts if line.name.startswith(point.rstrip("/") + "/")]
        return max(above, key=lambda mount: len(mount[0]), default=("", ""))[1] not in IN_MEMORY
    return True
