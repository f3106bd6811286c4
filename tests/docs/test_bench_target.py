"""`make bench` and `make figures` run what the pages say, with a stand-in for Python that writes down its arguments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PART = ["-m benchmarks --suite rooms"]
WHOLE = [
    "-m benchmarks --rounds 3",
    *(["-m benchmarks.overlap --rounds 3"] if os.geteuid() == 0 else []),
    "-W ignore -m benchmarks.sglang --rounds 3",
    "-W ignore -m benchmarks.vllm --rounds 3",
    "-m tools.figures --table build/bench",
]


@pytest.mark.parametrize(
    ("target", "given", "run"),
    [
        ("bench", "ROUNDS=3", WHOLE),
        ("bench", "ARGS=--suite rooms", PART),
        ("figures", "", ["-m tools.figures --take build/bench --write"]),
    ],
)
def test_a_target_runs_its_parts_in_order(tmp_path: Path, target: str, given: str, run: list[str]) -> None:
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    python.chmod(0o755)
    engines = (f"{engine}_PYTHON=python={python}" for engine in ("SGLANG", "VLLM"))
    command = ["make", "-o", "setup", "-o", ".venv/.stamp-dev", target, f"BIN={tmp_path}", *engines, given]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        [each for each in command if each], cwd=ROOT, env=own, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert log.read_text().splitlines() == run
