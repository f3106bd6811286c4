"""Finds what MemFabric needs and a machine lacks, without MemFabric.

MemFabric can be imported anywhere. If it cannot run, its start returns -1 and no text. So this module checks the
machine, in the order in which the library needs things.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from statelink.backend.native import elsewhere, loads, needs, on_machine, settings

if TYPE_CHECKING:
    from statelink.backend import Check

    from ._options import Options

__all__ = ["devices", "diagnose", "driver", "library", "missing", "trial"]

DEV, INSTALLED = "/dev", "/etc/ascend_install.info"
HAL = "libascend_hal.so"
TRIAL = """
import os, sys, msgspec
os.environ.setdefault("MF_LOG_LEVEL", "3")  # errors, to standard output
from statelink_ascend import Options
from statelink_ascend._library import Library
options = msgspec.json.decode(sys.argv[1], type=Options)
try:
    reason = Library(options.data_op_type).start("127.0.0.1:0", "Prefill", options.device_id, options.nic)
except Exception as error:
    reason = f"{type(error).__name__}: {error}"
sys.stdout.flush()
print(reason, file=sys.stderr, flush=True)
os._exit(1 if reason else 0)  # what it would take seconds to release goes with the process
"""


def missing(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Everything that MemFabric needs and that is missing here, each as a clause."""
    if library() is None:
        yield "the Python package memfabric_hybrid is not installed (pip install memfabric-hybrid)"
    if not devices():
        yield f"there is no NPU: no {on_machine(DEV)}/davinci0, nor any other number"
    version, path = driver()
    if version is None:
        yield f"there is no NPU driver: {path} is absent or names no version"
    home = environment.get("ASCEND_HOME_PATH")
    if not home:
        yield "CANN is not set up: ASCEND_HOME_PATH is not set (source its set_env.sh)"
    elif not (Path(home) / "lib64" / "libascendcl.so").exists():
        yield f"CANN is incomplete: {home}/lib64/libascendcl.so is absent"
    if not loads(HAL):
        yield f"{HAL} cannot be loaded: the driver's libraries are not on the loader's path"


def diagnose() -> Iterator[Check]:
    """See `statelink.backend.Diagnosing`."""
    yield from needs(missing(), f"memfabric_hybrid {library()}, {', '.join(devices())}, driver {driver()[0]}")
    yield settings("MF_", "ASCEND_")


def trial(options: Options) -> tuple[str, str]:
    """Start an engine in another process. Returns why it did not start, and the end of the library's log."""
    done = elsewhere(TRIAL, msgspec.json.encode(options).decode(), patience=120.0)
    log = " | ".join(done.output.splitlines()[-4:])
    if done.status in (0, 1):
        return done.last if done.status else "", log
    return f"its start ended the process: {done.how}", log


def library() -> str | None:
    """Version of MemFabric, or ``None`` if it is not installed."""
    if importlib.util.find_spec("memfabric_hybrid") is None:
        return None
    try:
        return importlib.metadata.version("memfabric-hybrid")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def devices() -> list[str]:
    """Names of the NPUs' device files; ``davinci_manager`` is not one."""
    return sorted(device.name for device in on_machine(DEV).glob("davinci[0-9]*"))


def driver() -> tuple[str | None, Path]:
    """Version of the NPU driver, or ``None``, and the file that should contain it."""
    root = _setting(on_machine(INSTALLED), "Driver_Install_Path_Param") or "/usr/local/Ascend"
    path = on_machine(root) / "driver" / "version.info"
    return _setting(path, "Innerversion") or _setting(path, "Version"), path


def _setting(path: Path, key: str) -> str | None:
    """The value in the line ``key=value`` of a file, if there is one."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    values = [value.strip() for name, _, value in (line.partition("=") for line in lines) if name.strip() == key]
    return values[0] if values and values[0] else None
