"""The checks of `statelink doctor` that do not depend on a backend: of the machine, and of adapters of engines."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from statelink import __version__
from statelink.backend import Check, Verdict
from statelink.config import Given
from statelink.errors import StatelinkError
from statelink.hints import install_hint
from statelink.opening import AUTO
from statelink.pointers import LOCKED, segments
from statelink.registry import entry_points, load_backend, plugin_failures, plugin_manager
from statelink.wire import Keys, check_keys

from ._checks import checked_alone
from ._configured import BY_ENGINE, Configured
from ._files import LEAST_FILES, few_files, most_files

if TYPE_CHECKING:
    from statelink.seam import Seam, Variable

__all__ = ["look"]

LEAST_LOCKED = 1 << 30
"""Least limit on locked memory, in bytes, with which an engine's pool can be registered with a network card."""
LEAST_SHARED = 64 << 20
OK, PROBLEM, NOT_APPLICABLE = Verdict.OK, Verdict.PROBLEM, Verdict.NOT_APPLICABLE


def look(found: Configured, root: Path = Path("/")) -> Iterator[Check]:
    """Every check, in order.

    Args:
        found: The configuration in the environment.
        root: Contains ``/sys``, ``/proc`` and ``/dev``.
    """
    yield _python()
    # Each of these imports packages, of which one may end its process.
    yield from _alone(_plugins, "loading them", "hook packages")
    yield from _alone(_engines, "importing an engine", "engines")
    yield from _alone(lambda: _configuration(found), "checking it", "configuration")
    yield from _keys(found)
    devices = sorted(path.name for path in _entries(root / "sys/class/infiniband"))
    yield from _rdma(root, devices)
    yield _locked(devices)
    yield _open_files()
    yield _network(root)
    yield _shared(root)
    yield _accelerators(root)
    yield _direct(root, devices)
    yield _allocator()


def _alone(work: Callable[[], Iterable[Check]], doing: str, what: str) -> Iterator[Check]:
    return (each for each in checked_alone(work, doing, what) if isinstance(each, Check))


def _python() -> Check:
    found = f"statelink {__version__}, {platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    if sys.maxsize < 1 << 32:
        return Check(what="python", verdict=PROBLEM, found=f"{found}: 32 bits", hint="use a 64-bit Python")
    return Check(what="python", verdict=OK, found=found)


def _plugins() -> Iterator[Check]:
    try:
        manager = plugin_manager()
    except Exception as error:  # with STATELINK_STRICT_PLUGINS
        found = f"{type(error).__name__}: {error}"
        yield Check(what="hook packages", verdict=PROBLEM, found=found, hint="uninstall it, or ask its author")
        return
    for failure in plugin_failures():
        found = f"{failure.name} failed to load: {failure.reason}"
        hint = f"{install_hint(failure.distribution, upgrade=True)}, or uninstall it"
        yield Check(what="hook packages", verdict=PROBLEM, found=found, hint=hint)
    names = ", ".join(sorted(name for name, _ in manager.list_name_plugin())) or "none"
    allowed = os.environ.get("STATELINK_PLUGINS")
    only = "" if allowed is None else f"; STATELINK_PLUGINS allows only {allowed or 'nothing'}"
    yield Check(what="hook packages", verdict=OK, found=f"{names}{only}")


def _configuration(found: Configured) -> Iterator[Check]:
    """Check the configuration in the environment, as far as `statelink.open` does without an inventory."""
    what = "configuration"
    problems = list(found.problems())
    for error in problems:
        said = str(error).partition("\nhint:")[0]
        yield Check(what=what, verdict=PROBLEM, found=said, hint=error.hint, code=error.code)
    if problems:
        return
    given = found.given
    if given is None:
        neither = "neither STATELINK_CONFIG nor the variable of a key is set"
        yield Check(what=what, verdict=NOT_APPLICABLE, found=neither)
        return
    places = sorted({f"{kind} {name}" for place in given.origins.values() for kind, name in place.items()})
    said = ", ".join(f"{key} {getattr(given.config, key)}" for key in BY_ENGINE if given.origin(key))
    left = " and ".join(repr(key) for key in BY_ENGINE if not given.origin(key))
    text = f"{said}{', ' if said else ''}from {', '.join(places)}"
    yield Check(what=what, verdict=OK, found=f"{text}; the engine sets {left}" if left else text)


def _keys(found: Configured) -> Iterator[Check]:
    """Say whether links have keys, and how many others these allow. `_configuration` says what is wrong with them."""
    what = "keys"
    try:
        keys = check_keys((found.given.config.keys if found.given else None) or Keys.from_environment())
    except StatelinkError as error:
        if found.given is None:  # nothing has looked at them
            said = str(error).partition("\nhint:")[0]
            yield Check(what=what, verdict=PROBLEM, found=said, hint=error.hint, code=error.code)
        return
    if keys is None:
        if "keys" not in found.lost:
            yield Check(what=what, verdict=NOT_APPLICABLE, found="none in the environment")
        return
    yield Check(what=what, verdict=OK, found=f"yes, {len(keys.allow)} allowed")


def _rdma(root: Path, devices: list[str]) -> Iterator[Check]:
    what = "RDMA devices"
    if not devices:
        yield Check(what=what, verdict=NOT_APPLICABLE, found="none")
        return
    states = {
        f"{name}/{port.name}": _text(port / "state").rpartition(" ")[2]
        for name in devices
        for port in _entries(root / "sys/class/infiniband" / name / "ports")
    }
    found = ", ".join(f"{port} {state.lower()}" for port, state in states.items()) or ", ".join(devices)
    if "ACTIVE" not in states.values():
        hint = "is the cable in, and the subnet manager or the interface up? See `rdma link`"
        yield Check(what=what, verdict=PROBLEM, found=f"no port is active: {found}", hint=hint)
    else:
        yield Check(what=what, verdict=OK, found=found)
    verbs = [path for path in _entries(root / "dev/infiniband") if path.name.startswith("uverbs")]
    if not verbs:
        hint = "load ib_uverbs; in a container, pass --device=/dev/infiniband"
        yield Check(what="/dev/infiniband", verdict=PROBLEM, found="there is no uverbs device", hint=hint)
    elif not all(os.access(path, os.R_OK | os.W_OK) for path in verbs):
        hint = "let this user read and write /dev/infiniband/uverbs*"
        yield Check(what="/dev/infiniband", verdict=PROBLEM, found="this user may not use it", hint=hint)
    else:
        yield Check(what="/dev/infiniband", verdict=OK, found=", ".join(path.name for path in verbs))


def _locked(devices: list[str], limit: int | None = None) -> Check:
    what = "locked memory"
    most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    amount = "unlimited" if most == resource.RLIM_INFINITY else f"{most >> 10} KiB"
    if not devices:
        return Check(what=what, verdict=NOT_APPLICABLE, found=f"{amount}; nothing here pins memory for a network card")
    if most == resource.RLIM_INFINITY or most >= LEAST_LOCKED:
        return Check(what=what, verdict=OK, found=amount)
    return Check(what=what, verdict=PROBLEM, found=f"{amount}: registering memory with RDMA fails", hint=LOCKED)


def _open_files() -> Check:
    what, most = "open files", most_files()
    found = "unlimited" if most is None else f"{most} for each process"
    hint = few_files()
    if hint:
        found = f"{found}: libraries and links need up to {LEAST_FILES}"
    return Check(what=what, verdict=PROBLEM if hint else OK, found=found, hint=hint)


def _network(root: Path) -> Check:
    up = {
        path.name: _text(path / "speed")
        for path in _entries(root / "sys/class/net")
        if path.name != "lo" and _text(path / "carrier") == "1"
    }
    if not up:
        return Check(what="network", verdict=NOT_APPLICABLE, found="loopback only: peers are on this machine")
    named = (f"{name} ({speed} Mbit/s)" if speed.isdecimal() else name for name, speed in sorted(up.items()))
    return Check(what="network", verdict=OK, found=", ".join(named))


def _shared(root: Path) -> Check:
    what = "/dev/shm"
    try:
        status = os.statvfs(root / "dev/shm")
    except OSError as error:
        hint = "mount a tmpfs there"
        return Check(what=what, verdict=PROBLEM, found=error.strerror or str(error), hint=hint)
    free = status.f_bavail * status.f_frsize
    if free < LEAST_SHARED:
        found = f"{free >> 20} MiB are free; libraries that share memory between processes need more"
        hint = "docker run --shm-size=1g; remove what dead processes left in /dev/shm"
        return Check(what=what, verdict=PROBLEM, found=found, hint=hint)
    return Check(what=what, verdict=OK, found=f"{free >> 20} MiB are free")


def _accelerators(root: Path) -> Check:
    """Find accelerators by the files of their drivers. A device without a driver has none."""
    found = []
    nvidia = _text(root / "proc/driver/nvidia/version")
    if nvidia:
        version = next((word for word in nvidia.split() if word[:1].isdigit() and "." in word), "unknown")
        count = sum(path.name[6:].isdecimal() for path in _entries(root / "dev") if path.name.startswith("nvidia"))
        if not count:
            hint = "in a container, pass the devices (docker run --gpus all)"
            said = f"the driver {version} is loaded, and there is no /dev/nvidia0"
            return Check(what="accelerators", verdict=PROBLEM, found=said, hint=hint)
        found.append(f"{count} of NVIDIA, driver {version}")
    if (root / "dev/kfd").exists():
        found.append("AMD: /dev/kfd")
    npus = sum(path.name[7:].isdecimal() for path in _entries(root / "dev") if path.name.startswith("davinci"))
    if npus:
        found.append(f"{npus} NPUs")
    if not found:
        return Check(what="accelerators", verdict=NOT_APPLICABLE, found="no driver of one is loaded")
    return Check(what="accelerators", verdict=OK, found="; ".join(found))


def _direct(root: Path, devices: list[str]) -> Check:
    """Check whether network cards can reach the memory of graphics cards of NVIDIA: GPUDirect RDMA.

    UCX and Mooncake register such memory through the module nvidia_peermem, or as a dma-buf of the driver, which the
    open kernel modules give. An IOMMU that translates, and bridges that send everything up to the root (ACS), make it
    slow or impossible.
    """
    what = "GPUDirect RDMA"
    if not devices or not _text(root / "proc/driver/nvidia/version"):
        return Check(what=what, verdict=NOT_APPLICABLE, found="needs an RDMA device and a graphics card of NVIDIA")
    peermem = (root / "sys/module/nvidia_peermem").exists()
    opened = "Open Kernel Module" in _text(root / "proc/driver/nvidia/version")
    groups = len(_entries(root / "sys/kernel/iommu_groups"))
    ways = ["nvidia_peermem"] * peermem + ["dma-buf (open kernel modules)"] * opened
    if not ways:
        hint = "modprobe nvidia_peermem, or install NVIDIA's open kernel modules, which give dma-bufs"
        found = "neither nvidia_peermem nor the open kernel modules: memory of a card is copied through the host"
        return Check(what=what, verdict=PROBLEM, found=found, hint=hint)
    hint = ""
    found = f"by {' and '.join(ways)}"
    if groups:
        found += f"; the IOMMU has {groups} groups"
        hint = "if it is slow: is the IOMMU in pass-through mode (iommu=pt), and ACS off on the bridges (lspci -vvv)?"
    return Check(what=what, verdict=OK, found=found, hint=hint)


def _allocator() -> Check:
    """Check the settings of torch's allocator in the environment."""
    what = "allocator"
    told = segments()
    if not told:
        return Check(what=what, verdict=NOT_APPLICABLE, found="the environment asks for no expandable segments")
    variables = ", ".join(dict.fromkeys(told.values()))
    found = f"{variables} asks for expandable segments, which many libraries cannot register, or move slowly"
    hint = f"set expandable_segments:False in {variables}, unless the transport is known to take them"
    return Check(what=what, verdict=PROBLEM, found=found, hint=hint)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


GROUP = "statelink.engines"
"""Entry points of adapters. Each one names a `Seam`."""


def _engines() -> Iterator[Check]:
    """Checks of each adapter. Imports the modules of its engine in which the adapter uses something."""
    for point, distribution, _ in entry_points(GROUP, every=True):
        try:
            seam: Seam = point.load()
            if seam.variable is not None and os.environ.get(seam.variable.name):
                yield from _configured(seam, seam.variable)
            yield _known(seam)
        except Exception as error:  # of the adapter, or of its engine
            found = f"{distribution} cannot say what it uses of its engine: {type(error).__name__}: {error}"
            hint = f"{install_hint(distribution, upgrade=True)}, or uninstall it"
            yield Check(what=point.name, verdict=Verdict.PROBLEM, found=found, hint=hint)


def _configured(seam: Seam, variable: Variable) -> Iterator[Check]:
    problems: list[StatelinkError] = []
    try:
        config = variable.read()
        problems += Configured(Given(config, {}), ()).problems()
        if config.backend != AUTO:
            load_backend(config.backend)
    except StatelinkError as error:
        problems.append(error)
    for each in problems:
        said = str(each).partition("\nhint:")[0]
        yield Check(what=variable.name, verdict=Verdict.PROBLEM, found=said, hint=each.hint, code=each.code)
    if not problems:
        found = f"backend {config.backend}; {seam.title} sets the role"
        yield Check(what=variable.name, verdict=Verdict.OK, found=found)


def _known(seam: Seam) -> Check:
    version = seam.installed()
    if not version:
        found = f"{seam.title} is not installed; {seam.adapter} works with {seam.window}"
        return Check(what=seam.engine, verdict=Verdict.NOT_APPLICABLE, found=found)
    try:
        seam.check(allowed=False)
    except StatelinkError as error:
        found = f"{seam.title} {version}: {error.reason.cause}"
        return Check(what=seam.engine, verdict=Verdict.PROBLEM, found=found, hint=error.hint, code=error.code)
    return Check(what=seam.engine, verdict=Verdict.OK, found=f"{seam.title} {version}, which {seam.adapter} knows")
