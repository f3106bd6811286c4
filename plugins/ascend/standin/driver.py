"""Builds the stand-in for an NPU's driver, and says what a process needs in its environment to load it.

``python -m plugins.ascend.standin.driver`` builds it, or says why it cannot be built.

MemFabric finds the driver's libraries as it finds CANN's: on the loader's path, and in ``ASCEND_HOME_PATH``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["Unbuilt", "environment"]

HERE = Path(__file__).parent
SOURCES = HERE / "driver.c", HERE / "preload.c"
BUILT = HERE.parents[2] / "build" / "ascend-driver"
LIBRARIES = ("ascend_hal", "ascendcl", "dcmi", "hccl", "hcomm", "nnopbase", "opapi", "ra", "runtime", "tsdclient")
"""Names, without ``lib`` and ``.so``, under which the library opens its parts."""
VERSION = "Innerversion=V100R001C23SPC005B219\n"
"""What the driver says of itself; the library wants at least this."""


class Unbuilt(Exception):
    """It cannot be built here; the text says why."""


def environment() -> dict[str, str]:
    """The variables with which a process finds the driver, built if it is not.

    Only `npu_memory` is added to Python's path, beside what this process has.

    Raises:
        Unbuilt: There is no compiler of C, or it fails.
    """
    home = BUILT / hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()[:16]
    if not home.exists():
        _build(home)
    return {
        "ASCEND_HOME_PATH": str(home),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(home / "lib64"), os.environ.get("LD_LIBRARY_PATH")])),
        "LD_PRELOAD": " ".join(filter(None, [str(home / "preload.so"), os.environ.get("LD_PRELOAD")])),
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)]),
    }


def _build(home: Path) -> None:
    """Build it beside, and move it into place: several processes may do so at once."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Unbuilt("there is no compiler of C (on Debian, apt install gcc libc6-dev)")
    BUILT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILT) as folder:
        made = Path(folder) / "home"
        (made / "lib64").mkdir(parents=True)
        for source in SOURCES:
            command = [compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", str(source)]
            target = made / f"{source.stem}.so"
            done = subprocess.run([*command, "-o", str(target), "-ldl"], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise Unbuilt(f"{compiler} does not compile {source.name}: {done.stderr.strip()[-2000:]}")
        for name in LIBRARIES:
            (made / "lib64" / f"lib{name}.so").symlink_to("../driver.so")
        (made / "version.info").write_text(VERSION)
        if not home.exists():
            try:
                made.rename(home)
            except OSError:
                if not home.exists():  # otherwise another process was first
                    raise


if __name__ == "__main__":
    try:
        environment()
    except Unbuilt as error:
        sys.exit(f"the tests of MemFabric need a stand-in for an NPU's driver: {error}")
