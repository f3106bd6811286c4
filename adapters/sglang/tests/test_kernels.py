"""Stand-ins for kernels give what SGLang's own give: in Triton, where its interpreter can run those, or in torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from engine_environments import SGLANG
from support.forks import PATH
from support.newest import OLDER

MOST = {"index keys": 1e-2}
"""The largest difference: of the order of rounding, for numbers around 1. SGLang rounds scores of keys to bfloat16."""


@pytest.fixture(scope="module")
def differences() -> dict[str, dict[str, float]]:
    environment = {**os.environ, **SGLANG, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, PATH))}
    command = [sys.executable, "-W", "ignore", "-m", "support.interpreted"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


OF_THE_NEWEST = "hyper-connections", "index keys", "keys", "rejected drafts"


@pytest.mark.parametrize("name", ["gates", "delta net", "Kimi's delta attention", *(() if OLDER else OF_THE_NEWEST)])
def test_a_stand_in_gives_what_the_kernel_gives(differences: dict[str, dict[str, float]], name: str) -> None:
    assert all(0 <= each < MOST.get(name, 1e-5) for each in differences[name].values()), differences[name]
