"""Rank processes that a test talks to in lines of JSON, over their standard input and output."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Process"]

ROOT = Path(__file__).parents[2]


class Process:
    """One rank: ``python -m module arguments...``.

    Args:
        module: A module of the tests.
        arguments: For it.
    """

    def __init__(self, module: str, *arguments: object) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in end()
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def say(self, **what: Any) -> None:
        """Tell it something."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def hear(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for what it says next."""
        assert self.process.stdout is not None
        if timeout is not None and not select.select([self.process.stdout], [], [], timeout)[0]:
            pytest.fail(f"a rank said nothing for {timeout} s: {self.log()}")
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(10)
            pytest.fail(f"a rank ended: {self.log()}")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def log(self) -> str:
        """The end of what it wrote to its standard error."""
        self.errors.seek(0)
        return self.errors.read()[-3000:]

    def end(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe is not None:
                pipe.close()
