"""Stand-ins for kernels give what SGLang's own Triton kernels give, where Triton's interpreter can run those."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from engine_environments import SGLANG
from support.forks import PATH

MOST = 1e-5
"""The largest difference: of the order of rounding, for numbers around 1."""


@pytest.fixture(scope="module")
def differences() -> dict[str, dict[str, float]]:
    environment = {**os.environ, **SGLANG, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, PATH))}
    command = [sys.executable, "-W", "ignore", "-m", "support.interpreted"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", ["gates", "delta net", "Kimi's delta attention"])
def test_a_stand_in_gives_what_the_kernel_gives(differences: dict[str, dict[str, float]], name: str) -> None:
    assert all(0 <= each < MOST for each in differences[name].values()), differences[name]
