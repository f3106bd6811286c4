"""Whether a backend can run on this machine, asked in a process of its own."""

from __future__ import annotations

import functools
import subprocess
import sys

from statelink.errors import StatelinkError
from statelink.registry import load_backend


@functools.cache
def problem_of(backend: str) -> str:
    """Why it cannot run here, with its default options; empty if it can."""
    code = f"from {__name__} import look; look({backend!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    return "" if done.returncode == 0 else (done.stdout.strip() or done.stderr[-2000:].strip() or str(done.returncode))


def look(name: str) -> None:
    """End this process, with that said, if it cannot run."""
    try:
        chosen = load_backend(name)
        probe = chosen.probe(chosen.Options())
        problem = "" if probe.ok else f"{probe.reason}\nhint: {probe.hint}"
    except StatelinkError as error:
        problem = str(error)
    if problem:
        print(problem)
        sys.exit(1)
