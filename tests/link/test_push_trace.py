"""The way of one small push, as CONTRIBUTING.md tells it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_FILES, MOST_RECEIVED = 16, 20
"""Most files of the way of a push until it is submitted, and of a receive until its request is sent."""
ELSEWHERE = 4
"""Most files that a link may enter for other reasons meanwhile, such as a timer, on a busy machine."""


def traced(*arguments: str) -> tuple[list[str], str]:
    """The files that the tool names, in their order, and its last line."""
    command = [sys.executable, "-m", "tools.push_trace", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    *lines, last = done.stdout.splitlines()
    return [line.split()[1] for line in lines], last


def test_the_reading_path_names_the_files_that_a_push_passes() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    path = text.partition("`python -m tools.push_trace` lists")[2].partition("A push that")[0]
    named = re.findall(r"`([\w/]+\.py)`", path)
    files, last = traced()
    assert set(named) <= set(files)
    assert len(set(files) - set(named)) <= ELSEWHERE, set(files) - set(named)
    assert len(named) <= MOST_FILES
    assert (files[0], len(named)) == ("link/prefill/_sending.py", len(set(named)))
    assert re.fullmatch(rf"\d+ calls of \d+ functions in {len(files)} files, \d+ changes of file, \d threads", last)


def test_the_whole_way_ends_on_both_sides() -> None:
    files, _ = traced("--until", "finished")
    assert {"tcp/_receiver.py", "link/decode/_receiving_state.py", "link/prefill/_outgoing.py"} <= set(files)


def test_a_receive_is_followed_until_its_request_is_sent() -> None:
    files, _ = traced("--until", "requested")
    assert (files[0], len(files) <= MOST_RECEIVED + ELSEWHERE) == ("link/_link.py", True), files
    assert {"link/decode/_receiving_state.py", "tcp/_grants.py", "wire/_channel.py"} <= set(files)
    assert not [name for name in files if name.startswith("link/prefill/")]
