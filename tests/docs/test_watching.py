"""The commands of docs/operate.md beside a program whose links are at work."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operate.md").read_text()
COMMANDS = """
statelink() {{ {python} -c "from statelink.cli import main; main()" "$@"; }}
curl() {{ {python} -c "import sys, urllib.request as of; print(of.urlopen(sys.argv[-1]).read().decode())" "$@"; }}
set -eo pipefail
"""
"""What a reader has on the path."""


def block(name: str) -> str:
    match = re.search(rf"<!-- tested by tests/docs/test_watching.py: {name} -->\n```sh\n(.*?)```", PAGE, re.DOTALL)
    assert match
    return match[1]


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path, since the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize("engine", [False, True], ids=["alone", "as in an engine"])
def test_the_commands_show_a_program_at_work(short: Path, engine: bool) -> None:
    """Engines tell the processes that have their links to write other metrics to files: the port serves the link's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    start, watch = block("program"), block("watch")
    assert "9464" in start
    assert "9464" in watch
    python, program, seconds, _ = shlex.split(start.partition("#")[0])
    assert (python, seconds) == ("python", "60")
    env = {name: value for name, value in os.environ.items() if not name.startswith("STATELINK_")}
    env |= {"XDG_RUNTIME_DIR": str(short), "COLUMNS": "200"}
    if engine:
        env["PROMETHEUS_MULTIPROC_DIR"] = str(short)
    command = [sys.executable, str(ROOT / program), "600", port]  # it is ended when the commands have run
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"process {process.pid} hands requests over\n"
            script = COMMANDS.format(python=shlex.quote(sys.executable)) + watch.replace("9464", port)
            done = subprocess.run(
                ["bash", "-c", script], env=env, capture_output=True, text=True, timeout=200, check=False
            )
        finally:
            process.kill()
    assert done.returncode == 0, done.stderr
    assert f"prefill rank 0 of prefill-0, process {process.pid}, over tcp" in done.stdout
    assert f"decode rank 0 of decode-0, process {process.pid}, over tcp" in done.stdout
    counted = [line for line in done.stdout.splitlines() if line.startswith("statelink_rooms_total{")]
    assert len(counted) == 2
    assert all('outcome="succeeded"' in line and float(line.rpartition(" ")[2]) >= 1 for line in counted)


def test_the_program_ends_with_equal_bytes() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(ROOT / "examples" / "one_minute.py"), "0.1", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\d+ requests, and the bytes are equal$", done.stdout, re.MULTILINE)
