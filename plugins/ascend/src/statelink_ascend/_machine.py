"""What MemFabric needs and a machine may lack, found without MemFabric.

It imports anywhere, and where it cannot run, its start returns -1 and no text. So this looks for itself, in the
order in which the library would stumble.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["devices", "driver", "library", "missing"]

DEV = Path("/dev")
INSTALLED = Path("/etc/ascend_install.info")
HAL = "libascend_hal.so"


def missing(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Everything that it needs and is not here, each as a clause."""
    if library() is None:
        yield "the Python package memfabric_hybrid is not installed (pip install 'statelink-ascend[npu]')"
    if not devices():
        yield f"there is no NPU: no {DEV}/davinci0, nor any other number"
    version, path = driver()
    if version is None:
        yield f"there is no NPU driver: {path} is absent or names no version"
    home = environment.get("ASCEND_HOME_PATH")
    if not home:
        yield "CANN is not set up: ASCEND_HOME_PATH is not set (source its set_env.sh)"
    elif not (Path(home) / "lib64" / "libascendcl.so").exists():
        yield f"CANN is incomplete: {home}/lib64/libascendcl.so is absent"
    if not _loads(HAL):
        yield f"{HAL} cannot be loaded: the driver's libraries are not on the loader's path"


def library() -> str | None:
    """Version of MemFabric, or ``None`` where it is not installed."""
    if importlib.util.find_spec("memfabric_hybrid") is None:
        return None
    try:
        return importlib.metadata.version("memfabric-hybrid")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def devices() -> list[str]:
    """Names of the NPUs' device files; ``davinci_manager`` is not one."""
    return sorted(device.name for device in DEV.glob("davinci[0-9]*"))


def driver() -> tuple[str | None, Path]:
    """Version of the NPU driver, or ``None``, and the file that should say it."""
    root = _setting(INSTALLED, "Driver_Install_Path_Param") or "/usr/local/Ascend"
    path = Path(root) / "driver" / "version.info"
    return _setting(path, "Innerversion") or _setting(path, "Version"), path


def _setting(path: Path, key: str) -> str | None:
    """The value in the line ``key=value`` of a file, if there is one."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    values = [value.strip() for name, _, value in (line.partition("=") for line in lines) if name.strip() == key]
    return values[0] if values and values[0] else None


def _loads(name: str) -> bool:
    """Whether the loader loads a library; asked in another process, which it may end as it likes."""
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, check=False, timeout=60)
    return done.returncode == 0
