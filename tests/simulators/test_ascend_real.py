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
from tests.simulators import ascend_answers
from tests.simulators.ascend_process import SIMULATORS


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
    real, simulated = asked(""), asked(str(SIMULATORS))
    if any(answers[0].startswith("0") for call, answers in real.items() if "initialize" in call and answers):
        pytest.skip("there is an NPU here")
    assert len(real) > 80
    assert simulated == real
