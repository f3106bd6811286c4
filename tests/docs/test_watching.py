"""The commands of docs/operate.md beside a program whose links are at work."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.helpers.peers import until

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


def test_one_side_of_the_program_is_killed_and_comes_back(short: Path) -> None:
    """What the page says of it: each side names the peer that it lost, and goes on with the next one."""
    command = shlex.split(block("sides").splitlines()[0].partition("#")[0])
    assert command[:2] + command[4:] == ["python", "examples/one_minute.py", "--role", "prefill"]
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        at, *ports = [each.getsockname()[1] for each in taken]
    env = {name: value for name, value in os.environ.items() if not name.startswith("STATELINK_")}
    env |= {"XDG_RUNTIME_DIR": str(short), "COLUMNS": "80", "PYTHONUNBUFFERED": "1"}
    running = []

    def side(role: str) -> tuple[int, Callable[[str], None]]:
        """Start a side. Returns its process id, and a function that waits until it prints such a line."""
        port = ports[role == "decode"]
        arguments = ["600", str(port), "--role", role, "--address", f"tcp://127.0.0.1:{at}"]
        program = [sys.executable, str(ROOT / "examples" / "one_minute.py"), *arguments]
        process = subprocess.Popen(program, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        running.append(process)

        def prints(pattern: str) -> None:
            assert process.stdout is not None
            seen = []
            for line in process.stdout:
                seen.append(line)
                if re.search(pattern, line):
                    return
            raise AssertionError((pattern, seen))

        return process.pid, prints

    def shows(pid: int, pattern: str) -> str:
        """What `statelink inspect` shows of a process, once it has such a line: no peer is shown between some rooms."""
        script = COMMANDS.format(python=shlex.quote(sys.executable)) + f"statelink inspect {pid}"

        def look() -> str:
            shown = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True).stdout
            return shown if re.search(pattern, shown) else ""

        return str(until(look, 60, what=pattern))

    try:
        prefill, prefill_prints = side("prefill")
        decode, decode_prints = side("decode")
        decode_prints("succeeded")
        prefill_prints("succeeded")
        shows(prefill, r"decode +0 +decode-0 +attached")
        shows(decode, r"prefill +0 +prefill-0 +ready")
        os.kill(decode, signal.SIGKILL)
        prefill_prints(r"lost decode rank decode-0\.0-\w+: its process has ended")
        prefill_prints("decode never asked for it")
        decode, decode_prints = side("decode")
        decode_prints("succeeded")
        os.kill(prefill, signal.SIGKILL)
        decode_prints(r"lost prefill rank prefill-0\.0-\w+: its process has ended")
        decode_prints("nothing listens there")
        shown = shows(decode, r"127\.0\.0\.1:\d+ +prefill +- +- +greeting ")
        assert re.search(r"peer +role +rank +instance +state +age +heard +transport", shown)
        assert max(map(len, shown.splitlines())) <= 80
    finally:
        for process in running:
            process.kill()
            process.communicate()


def test_the_program_ends_with_equal_bytes() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(ROOT / "examples" / "one_minute.py"), "0.1", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\d+ requests, and the bytes are equal$", done.stdout, re.MULTILINE)
