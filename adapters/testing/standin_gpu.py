"""Runs tests in a process over the stand-in GPU, where `late_device` is that GPU."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["passed_over_standin_gpu"]

ROOT = Path(__file__).resolve().parents[2]
STANDIN = ROOT / "tests" / "gpu" / "standin" / "__init__.py"
LIMIT_SECONDS = 300


def passed_over_standin_gpu(file: Path, folder: Path) -> int:
    """Run those tests of a file that are marked ``standin_gpu``; how many there are. One that fails is an error.

    Args:
        file: The tests.
        folder: Where the GPU's libraries are built.
    """
    standin = runpy.run_path(str(STANDIN))  # `tests` are the adapter's here
    if not standin["compiler"]():
        if os.environ.get("CI"):
            pytest.fail("the stand-in GPU is required, and there is no C compiler", pytrace=False)
        pytest.skip("the stand-in GPU needs a C compiler: apt-get install gcc")
    adapter = file.parents[1]
    words = ("-c", adapter / "pyproject.toml", "--rootdir", adapter, "-p", "no:cacheprovider", "-m", "standin_gpu")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", *map(str, words), str(file)],
        env=standin["build"](folder).environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    found = re.search(r"(\d+) passed", done.stdout)
    assert found, done.stdout
    return int(found[1])
