"""Drivers are found among the libraries that a process has loaded, and none is ever loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

DRIVER = """
#include <stdint.h>
typedef unsigned long long address;
int cuPointerGetAttributes(unsigned n, const unsigned *asked, void **found, address at) {
    for (unsigned i = 0; i < n; i++)
        if (asked[i] == 2) *(unsigned *)found[i] = at % 4096 == 64 ? 2 : 0;
    return 0;
}
int cuPointerGetAttribute(void *found, unsigned asked, address at) { return 1; }
"""
OPEN = """
import ctypes, mmap, os, sys
import numpy as np
import statelink
from statelink import state
from statelink.errors import StateError
from statelink.pointers import Platform

pages = np.frombuffer(mmap.mmap(-1, 8192), np.uint8)

def opened(first, kind="dram"):
    memory = state.Memory.pointer(pages.ctypes.data + first, (1, 64), "uint8", 1, kind=kind)
    config = {"role": "decode", "backend": "tcp", "inspect": False}
    with statelink.open(config, state.describe("d", [state.aux_rows({"row": memory})])) as link:
        return link.snapshot()["memory"]

def mapped():
    return any("libcuda.so" in line or "libamdhip64.so" in line for line in open("/proc/self/maps"))
"""


def run(folder: Path, code: str) -> str:
    """In a process that would find the driver in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", OPEN + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_a_link_over_host_memory_loads_no_driver(tmp_path: Path) -> None:
    """Although one is there. A library of that name that is none is not asked, either."""
    some = find_spec("msgspec._core")
    assert some is not None
    for name in ("libcuda.so.1", "libamdhip64.so.6"):
        shutil.copy(str(some.origin), tmp_path / name)
    printed = run(
        tmp_path,
        """
        opened(64)
        assert not mapped()
        with open(os.environ["LD_LIBRARY_PATH"] + "/libcuda.so.1", "rb") as file:
            read = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)  # looked into, and not loaded
        assert mapped()
        opened(64)
        read.close()
        assert not mapped()
        ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libamdhip64.so.6")
        assert mapped()
        assert Platform.here().drivers == ()
        print(opened(64)["dram"]["checked"])
        """,
    )
    assert printed == "the process's map\n"


def test_a_driver_that_the_process_has_loaded_is_asked(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a stand-in for libcuda needs a C compiler")
    source = tmp_path / "driver.c"
    source.write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True, timeout=50)
    printed = run(
        tmp_path,
        """
        opened(0), opened(64)
        ctypes.CDLL("libcuda.so.1")
        opened(0)
        try:
            opened(64)
        except StateError as error:
            print(error.reason.cause)
        """,
    )
    assert printed.endswith("the CUDA driver says that it is memory of device 0\n")
