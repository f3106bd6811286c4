"""Two processes that hand one component over, with whatever packages of third parties each has installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

Environment = Mapping[str, str]


def start(role: str, backend: str, kind: str, *arguments: str, environment: Environment) -> subprocess.Popen[str]:
    """One side. Without `STATELINK_PLUGINS` it has every package; with it, those that are named."""
    command = [sys.executable, str(HERE / "mover.py"), role, backend, kind, *arguments]
    merged = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE / "packages"), *sys.path]))}
    return subprocess.Popen(
        command, env={**merged, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def hand_over(
    backend: str, kind: str, prefill: Environment | None = None, decode: Environment | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What prefill and decode say at their end. Raises `AssertionError` with what a side printed if it failed."""
    sender = start("prefill", backend, kind, environment=prefill or {})
    receiver = None
    try:
        assert sender.stdout is not None
        address = sender.stdout.readline().strip()
        receiver = start("decode", backend, kind, address, environment=decode or {})
        out, errors = receiver.communicate(timeout=60)
        assert receiver.returncode == 0, errors
        sent, errors = sender.communicate(timeout=60)
        assert sender.returncode == 0, errors
    finally:
        for process in filter(None, (sender, receiver)):
            process.kill()
            process.communicate()
    return json.loads(sent.splitlines()[-1]), json.loads(out.splitlines()[-1])
