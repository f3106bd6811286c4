"""A stand-in GPU for tests: builds libraries with the names of NVIDIA's, and the environment in which they load.

The driver is written in C, beside this file: see ``standin.h``. The real NIXL, and UCX's own code for CUDA, run over it
in child processes. It starts only where the environment says ``STANDIN_GPU=for tests only``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["Standin", "build", "compiler"]

SOURCES = Path(__file__).parent
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden")
DRIVER = ("contexts.c", "memory.c", "streams.c", "absent.c")
RUNTIMES = (12, 13)
"""Versions of CUDA's runtime, for the builds of NIXL."""
VERSIONED = "libcudart.so.{0} {{ global: cudaGetSymbolSize; local: *; }};\n"


def compiler() -> str:
    """The system's C compiler; empty if there is none."""
    return shutil.which("cc") or shutil.which("gcc") or ""


class Standin:
    """The libraries, and how a process comes to use them.

    Args:
        folder: Where they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def environment(self, log: Path | None = None, **more: str) -> dict[str, str]:
        """The environment of a process over the stand-in.

        Args:
            log: Each process writes what happened on its threads to a file of its own: this name, a dot, its number.
            more: Variables, such as ``STANDIN_GPU_DEVICES``.
        """
        paths = [str(self.folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        found = {**os.environ, "STANDIN_GPU": "for tests only", "LD_LIBRARY_PATH": os.pathsep.join(paths)}
        return {**found, **({"STANDIN_GPU_LOG": str(log)} if log else {}), **more}

    def without(self, library: str, folder: Path) -> Standin:
        """A copy that lacks one library, as on a machine where it is not installed."""
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns(library))
        return Standin(folder)


def build(folder: Path) -> Standin:
    """Compile the libraries into a folder."""
    _compile(folder / "libcuda.so.1", *DRIVER, "-lpthread", "-ldl")
    _compile(folder / "libnvidia-ml.so.1", "nvml.c")
    for version in RUNTIMES:
        script = folder / f"runtime-{version}.map"
        script.write_text(VERSIONED.format(version))
        _compile(folder / f"libcudart.so.{version}", "runtime.c", f"-Wl,--version-script={script}")
    return Standin(folder)


def _compile(library: Path, *words: str) -> None:
    command = [compiler(), *FLAGS, f"-Wl,-soname,{library.name}", "-o", str(library), *words]
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"the stand-in GPU does not compile:\n{done.stderr}")
