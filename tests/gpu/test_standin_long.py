"""The whole kit, and each part of a first run on a card, over the stand-in GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tools.gpu import QUICK

if TYPE_CHECKING:
    from tests.gpu.standin import Standin

pytestmark = pytest.mark.soak

HERE = Path(__file__).parent
NO_DEVICE_FILE = {"test_it_tells_the_transport_of_a_peer"}
"""Where there is no /dev/nvidiactl, nobody expects cuda_ipc."""
NEED_TORCH = {"tests"}
"""Tests of torch itself. `make test` has those that need no card."""


def environment(standin: Standin) -> dict[str, str]:
    paths = [str(HERE / "torches" / "standin"), *filter(None, sys.path)]
    return {**standin.environment(), "PYTHONPATH": os.pathsep.join(paths)}


def test_every_part_of_a_first_run(standin: Standin, tmp_path: Path) -> None:
    parts = [name for name in QUICK if name not in NEED_TORCH]
    words = ("-m", "tools.gpu", "--quick", "--seconds", "900", "--out", str(tmp_path), "--part", *parts)
    done = subprocess.run([sys.executable, *words], env=environment(standin), cwd=HERE.parents[1], check=False)
    said = [json.loads(line) for line in (tmp_path / "quick.jsonl").read_text().splitlines()]
    statuses = {each["part"]: each["value"] for each in said if each["what"] == "status"}
    assert statuses == dict.fromkeys(parts, "passed")
    assert done.returncode == 0


def test_the_whole_kit(standin: Standin) -> None:
    """One clause fails, because the stand-in has no file of a device."""
    words = ("-c", "from statelink.cli import main; main()", "conform", "nixl", "--memory", "cuda:0", "--json")
    given = ("--allocator", "tools.card.allocator:Memory", "--require")
    done = subprocess.run(
        [sys.executable, *words, *given],
        env=environment(standin),
        cwd=HERE.parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    (run,) = json.loads(done.stdout[done.stdout.index("{\n") :])["runs"]
    verdicts = {clause["name"].rpartition("::")[2]: clause["verdict"] for clause in run["clauses"]}
    failed = {name for name, verdict in verdicts.items() if verdict in ("failed", "deviates")}
    assert failed <= NO_DEVICE_FILE
    assert sum(verdict == "passed" for verdict in verdicts.values()) > 100
