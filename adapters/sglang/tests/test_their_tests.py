"""SGLang's own mini balancer, its parity kit for logprobs, and its tests of aborts and of failing peers, over HTTP.

See `support/their_tests.py` for what of them is replaced. Of SGLang's tests these do not run here: those in
``test/registered/disaggregation`` need GPUs and real models and are not in the wheel, and those in
``test/registered/unit/disaggregation`` look into SGLang's own managers; `test_transfer.py` states the same things.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

import pytest
from engine_environments import SGLANG
from engine_processes import OwnProcess
from support.forks import TESTS
from support.models import make_llama

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1500)]

ANSWER = 1200.0


@pytest.fixture(scope="module", autouse=True)
def _balancer() -> None:
    """SGLang's mini balancer is in a package of its own."""
    if importlib.util.find_spec("sglang_router") is None:
        assert os.environ.get("CI") != "true", "sglang-router is not installed"
        pytest.skip("sglang-router is not installed")


@pytest.fixture(scope="module")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that takes the long prompts of SGLang's tests."""
    folder = tmp_path_factory.mktemp("models") / "long"
    make_llama(folder, context=1 << 15)
    return folder


@pytest.mark.parametrize("name", ["Parity", "ChunkedPrefillAbort", "PeerLiveness", "CleanRecovery"])
def test_sglangs_own_test_passes(name: str, long_llama: Path, tmp_path: Path) -> None:
    # SGLang's fixtures call these by name.
    programs = tmp_path / "bin"
    programs.mkdir()
    ours = 'case "$1 $2" in "-m sglang.launch_server") shift 2; set -- -m support.launch "$@";; esac\n'
    for program, before, start in (("python3", ours, ""), ("sglang", "", "-m support.sglang_command")):
        script = programs / program
        script.write_text(f'#!/bin/sh\n{before}exec "{sys.executable}" -W ignore {start} "$@"\n')
        script.chmod(0o755)
    environment = {
        **SGLANG,
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "PYTHONPATH": str(TESTS),
        "SGLANG_TEST_PD_DISAGG_BACKEND": "statelink",
        "SGLANG_TEST_MAX_RETRY": "0",
        "STATELINK_SGLANG_CONFIG": '{"backend": "tcp", "verify": "digest"}',
        "STATELINK_TINY_MODEL": str(long_llama),
    }
    command = [sys.executable, "-W", "ignore", "-m", "unittest", "-v", f"support.their_tests.{name}"]
    process = OwnProcess(name, tmp_path, command, environment)
    try:
        code = process.wait_end(ANSWER)
    finally:
        process.kill()  # also the servers that it has left behind
    text = process.logged()
    assert code == 0, text[-8000:]
    assert "Statelink backend 'tcp' moves kv, aux of this decode rank" in text, text[-8000:]
