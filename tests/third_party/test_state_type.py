"""A state type of somebody else's package moves over every backend, and no backend was changed for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def start(role: str, backend: str, *arguments: str, package: bool = True) -> subprocess.Popen[str]:
    environment = dict(os.environ)
    if package:
        environment["PYTHONPATH"] = str(HERE / "packages")
    command = [sys.executable, str(HERE / "mover.py"), role, backend, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_third_partys_type_moves(backend: str) -> None:
    prefill = start("prefill", backend)
    try:
        assert prefill.stdout is not None
        address = prefill.stdout.readline().strip()
        decode = start("decode", backend, address)
        out, errors = decode.communicate(timeout=60)
        assert decode.returncode == 0, errors
        sent, errors = prefill.communicate(timeout=60)
        assert prefill.returncode == 0, errors
    finally:
        prefill.kill()
        prefill.wait()
    arrived, left = json.loads(out.splitlines()[-1]), json.loads(sent.splitlines()[-1])
    assert arrived["digest"] == left["digest"]
    assert arrived["clean"]


def test_without_the_package_the_type_is_unknown_by_name() -> None:
    process = start("prefill", "tcp", package=False)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "no state type named 'acme.trace'" in errors
