"""Runs ``statelink`` over memory of the card, which torch allocates, or the driver if torch reaches no card."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from typing import NamedTuple

from .device import cuda_torch

__all__ = ["Done", "statelink"]

COMMAND = "from statelink_command import main; main()"
DEVICE = "cuda:0"
PATIENCE = 10
"""Seconds for the command to end after an interrupt."""


class Done(NamedTuple):
    """What the command printed, and its exit status; ``None`` if it took too long."""

    output: str
    errors: str
    status: int | None


def statelink(*words: str, seconds: float) -> Done:
    """Run ``statelink WORDS --memory cuda:0``, and interrupt it after some seconds."""
    allocator = () if cuda_torch() is not None else ("--allocator", "tools.card.allocator:Memory")
    command = [sys.executable, "-c", COMMAND, *words, "--memory", DEVICE, *allocator]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as output,
        tempfile.TemporaryFile("w+", errors="replace") as errors,
    ):
        process = subprocess.Popen(command, stdout=output, stderr=errors, env={**os.environ, "PYTHONPATH": path()})
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
            process.send_signal(signal.SIGINT)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        output.seek(0)
        errors.seek(0)
        done = Done(output.read(), errors.read(), status)
    print(done.output, done.errors, sep="\n", flush=True)
    return done


def path() -> str:
    """Where the command's processes import from: this tree has the allocator."""
    return os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
