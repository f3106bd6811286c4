"""Whether a backend can run on this machine, asked in a process of its own."""

from __future__ import annotations

import functools
import subprocess
import sys

from statelink.errors import BackendError
from statelink.registry import load_backend

__all__ = ["problem_of"]


@functools.cache
def problem_of(backend: str) -> str:
    """Why it cannot; empty if it can."""
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import main; main({backend!r})"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return "" if done.returncode == 0 else (done.stdout.strip() or done.stderr[-2000:].strip() or str(done.returncode))


def main(name: str) -> None:
    try:
        chosen = load_backend(name)
        probe = chosen.probe(chosen.Options())
    except BackendError as error:
        print(error)
        sys.exit(1)
    if not probe.ok:
        print(f"{probe.reason}\nhint: {probe.hint}")
        sys.exit(1)
