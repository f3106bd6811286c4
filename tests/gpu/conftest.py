"""The stand-in GPU, built once, and how tests run programs over it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.gpu.standin import build, compiler
from tools.card.say import FILE

if TYPE_CHECKING:
    from tests.gpu.standin import Standin

TORCHES = Path(__file__).parent / "torches"
LIMIT_SECONDS = 100

Run = Callable[..., "Ran"]


class Ran:
    """A program that has ended.

    Attributes:
        status: Its exit status.
        output: What it printed.
        answers: What it answered, by the question, if it is one of `tools.card`.
        log: What happened on each thread of each of its processes: the thread's number, the device of its context or
            -1, and a text.
    """

    def __init__(self, status: int, output: str, answers: dict[str, Any], log: list[tuple[str, int, str]]) -> None:
        self.status, self.output, self.answers, self.log = status, output, answers, log

    def answer(self, question: str) -> Any:
        """The answer to the one question that begins like this."""
        (found,) = [value for asked, value in self.answers.items() if asked.startswith(question)]
        return found

    def contexts(self) -> set[str]:
        """The devices on which it made contexts."""
        return {text.rpartition(" ")[2] for _, _, text in self.log if text.startswith("context made")}


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Standin:
    """The libraries. Without a compiler, its tests are skipped; in CI they fail then."""
    if not compiler():
        if os.environ.get("CI"):
            pytest.fail("the stand-in GPU is required, and there is no C compiler", pytrace=False)
        pytest.skip("the stand-in GPU needs a C compiler: apt-get install gcc")
    return build(tmp_path_factory.mktemp("standin"))


@pytest.fixture
def run(standin: Standin, tmp_path: Path) -> Run:
    """Runs a program over the stand-in, with these words after the interpreter."""

    def start(*words: str, torch: str = "none", over: Standin | None = None, **variables: str) -> Ran:
        answers, log = tmp_path / "answers", tmp_path / "log"
        answers.write_text("")
        environment = (over or standin).environment(log, **{FILE: str(answers), **variables})
        paths = [str(TORCHES / torch), *filter(None, sys.path)]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        done = subprocess.run(
            [sys.executable, *words],
            env=environment,
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT_SECONDS,
            check=False,
        )
        said = [json.loads(line) for line in answers.read_text().splitlines()]
        lines: list[tuple[str, int, str]] = []
        for file in sorted(tmp_path.glob("log.*")):
            for line in file.read_text().splitlines():
                _, thread, device, text = line.split(" ", 3)
                lines.append((thread, int(device), text))
            file.unlink()
        return Ran(done.returncode, done.stdout, {each["what"]: each["value"] for each in said}, lines)

    return start
