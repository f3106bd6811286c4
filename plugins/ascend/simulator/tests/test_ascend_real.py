"""The simulated ``memfabric_hybrid`` beside the real package, as far as that gets on a machine without an NPU.

The real one imports, checks its arguments, and fails to start; its answers to all of that have to be the simulator's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from plugins.ascend.simulator.tests import ascend_answers
from plugins.ascend.simulator.tests.ascend_process import SIMULATOR

FAILS = """
import os, re, sys
import memfabric_hybrid as library
taken = []
if "function" in sys.argv:
    library.set_extern_logger(lambda level, text: taken.append((level, text)))
if "before" in sys.argv:
    library.set_log_level(3)
engine = library.TransferEngine()
assert engine.initialize("tcp://127.0.0.1:0", "127.0.0.1:0", "Prefill", 0)
print("TAKEN", sorted({text[1:].split()[0] for level, text in taken if level == 3} - {"HYBM"}), file=sys.stderr)
os._exit(0)
"""


def asked(path: str) -> dict[str, list[str]]:
    """What the first ``memfabric_hybrid`` on a path answers."""
    code = f"import runpy; runpy.run_path({ascend_answers.__file__!r}, run_name='__main__')"
    environment = {**os.environ, "MEMFABRIC_SIM_NPU": "absent", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    if not path and "No module named 'memfabric_hybrid'" in done.stderr:
        pytest.skip("memfabric_hybrid is not installed")
    found = re.search(r"^ANSWERS (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stderr
    answers: dict[str, list[str]] = json.loads(found[1])
    return answers


def test_names_and_answers_are_the_librarys() -> None:
    """Signatures, members, codes, texts and kinds of exceptions of 1.3.0."""
    real, simulated = asked(""), asked(str(SIMULATOR))
    if any(answers[0].startswith("0") for call, answers in real.items() if "initialize" in call and answers):
        pytest.skip("there is an NPU here")
    assert len(real) > 80
    assert simulated == real


@pytest.mark.parametrize("level", ["3", "4", "5"])
@pytest.mark.parametrize("how", [(), ("function",), ("function", "before")], ids=" ".join)
def test_lines_of_the_log_go_where_the_librarys_go(level: str, how: tuple[str, ...]) -> None:
    """Errors of a start that fails. The bindings never use the function, and a start takes its level from outside."""
    found = []
    for path in ("", str(SIMULATOR)):
        environment = {**os.environ, "MEMFABRIC_SIM_NPU": "absent", "PYTHONPATH": path, "MF_LOG_LEVEL": level}
        command = [sys.executable, "-c", FAILS, *how]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if not path and "No module named 'memfabric_hybrid'" in done.stderr:
            pytest.skip("memfabric_hybrid is not installed")
        if "AssertionError" in done.stderr:
            pytest.skip("there is an NPU here")
        parts = set(re.findall(r"ERROR \[\d+-\d+\]\[(\w+)", done.stdout)) - {"HYBM"}
        found.append((parts, done.stderr))
    assert found[1] == found[0]
