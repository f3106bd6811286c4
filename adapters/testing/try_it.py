"""What `make try-sglang` and `make try-vllm` have in common: a page's own commands, and what is printed at the end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pages import DOCS

__all__ = ["PROMPT", "block", "folder", "report", "request", "tried"]

PROMPT = " ".join(f"t{70 + number * 3 % 400}" for number in range(100))
"""A prompt of 100 tokens of a tiny model."""


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder for a model and logs, which goes at the end. Links that open meanwhile are inspected there alone."""
    with tempfile.TemporaryDirectory(prefix="try-") as made:
        os.environ["XDG_RUNTIME_DIR"] = made
        yield Path(made)


def block(page: str, words: str) -> str:
    """The one block of a shell's commands on a page that has some words, as one line for each command."""
    shown = re.findall(r"^```sh\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    (found,) = (each for each in shown if words in each)
    return str(found).replace("\\\n", " ")


def request(page: str, words: str, model: str) -> dict[str, Any]:
    """The body that the command ``curl`` in such a block posts, with a model and a prompt of ours."""
    (body,) = re.findall(r"curl .*-d '(.*)'", block(page, words))
    return {**json.loads(body), "model": model, "prompt": PROMPT, "temperature": 0, "ignore_eos": True}


def report(routed: str, alone: str) -> None:
    """Print both answers and what the links say.

    Raises:
        SystemExit: The answers differ, there is none, or a link does not answer.
    """
    print(f"prefill, then decode: {routed}\none server alone:     {alone}", flush=True)
    inspected = subprocess.run([Path(sys.executable).with_name("statelink"), "inspect"], check=False)
    if not routed or routed != alone or inspected.returncode:
        raise SystemExit("the pair did not answer as one server does")
    print("the answers are equal")


def tried(path: Sequence[Path | str]) -> str:
    """What the program prints, for its tests: it must succeed, and no process that it started may stay.

    Args:
        path: Where the program finds its modules.
    """
    mark = f"try-{os.getpid()}"
    marked = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "STATELINK_TRIED": mark}
    command = [sys.executable, "-W", "ignore", "-m", "support.try_pair"]
    done = subprocess.run(command, env=marked, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    until = time.monotonic() + 60
    while left := [each for each in Path("/proc").glob("[0-9]*") if _has(each, mark)]:
        assert time.monotonic() < until, left
        time.sleep(0.1)
    return done.stdout


def _has(process: Path, mark: str) -> bool:
    try:
        return f"STATELINK_TRIED={mark}".encode() in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
