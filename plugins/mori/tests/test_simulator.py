"""The simulator answers as the real MoRI does: each is asked the same questions, and its answers compared.

`ANSWERS` has what MoRI 1.2.4 says. The simulator is asked in every run, and the real library where it is installed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from plugins.mori.tests import questions
from plugins.mori.tests.world import REAL, changes_the_card

SIMULATOR = Path(__file__).parents[1] / "simulator"
UNFIT = "incompatible function arguments. The following argument types are supported:"
UNFIT_PARAMETER = f"TypeError: __init__(): {UNFIT.replace('function', 'constructor')}"
NOT_FOUND = "RdmaBackend::CreateSession: remote MR size mismatch for engine b rdevId=0 memId=0 expected=1048576 got=0"
NO_ANSWER = "ReadMessageHeader(type) failed: expected 1 byte(s), received 0"
FLUSHED = "ERR_RDMA_OP: Work Request Flushed Error"
RETRIES = "transport retry counter exceeded"
UNREACHABLE = f"completion status {RETRIES}: peer did not acknowledge within the transport retry budget"
DONE = "SUCCESS: success"
ENDS = "exit status "

ANSWERS: dict[str, Any] = {
    "names": [False, True, True],
    "subscripted_enumeration": "TypeError: 'pybind11_type' object is not subscriptable",
    "unknown_parameter": UNFIT_PARAMETER,
    "text_for_a_number": UNFIT_PARAMETER,
    "boolean_for_a_number": 1,
    "number_for_a_boolean": True,
    "no_queue_pair": "ERR_INVALID_ARGS: no endpoints",
    "no_notification_with_notifications": (
        "RuntimeError: Invalid RDMA config: notifPerQp must be >= 1 when notification is enabled"
    ),
    "no_notification_without": "taken",
    "small_chunks": "RuntimeError: Invalid RDMA config: chunkBytes must be >= 4096 when chunking is enabled",
    "tcp": ["NotImplementedError: backend not implemented yet", f"TypeError: CreateBackend(): {UNFIT}"],
    "tcp_with_a_configuration": ENDS + "-6",
    "descriptors": [True, True, "a", 0, -1, 1 << 20, "CPU", "a", "127.0.0.1", True, True, True],
    "garbage": ["RuntimeError: std::bad_cast", "RuntimeError: std::bad_cast", "RuntimeError: insufficient bytes"] * 2,
    "no_bytes": f"TypeError: unpack(): {UNFIT}",
    "unregistered_engine": True,
    "unknown_memory": f"RuntimeError: {NOT_FOUND}",
    "host_memory_over_xgmi": True,
    "lengths_that_differ": "ERR_INVALID_ARGS: lengths of local offsets, remote offsets or sizes mismatch",
    "beyond_the_end": ["ERR_INVALID_ARGS: length out of range", "ERR_INVALID_ARGS: length out of range", DONE],
    "an_empty_batch": "SUCCESS: ",
    "a_negative_offset": f"TypeError: BatchWrite(): {UNFIT}",
    "many_blocks": [DONE, 63000],
    "local_memory_that_is_gone": ["ERR_RDMA_OP: local protection error Hint:", FLUSHED],
    "remote_memory_that_is_gone": ["ERR_RDMA_OP: remote access error Hint:", FLUSHED, True],
    "a_large_request": (
        "ERR_INVALID_ARGS: merged RDMA WR 0 length 1001 exceeds local max_msg_sz 1000; "
        "enable RDMA transfer chunking or reduce batch size"
    ),
    "a_full_queue": ["ERR_RDMA_OP: SQ full (batch): ep=0 depth=4 requested=4 max=4 Hint:", DONE],
    "a_queue_that_is_shortened_after_connecting": [DONE, DONE],
    "a_frozen_peer": [DONE, True],
    "a_stopped_peer": [
        f"RuntimeError: {NO_ANSWER}, errno=11 (Resource temporarily unavailable)",
        "RuntimeError: connect(127.0.0.1:PORT): Connection refused",
    ],
    "a_peer_whose_memory_cannot_be_pinned": [f"RuntimeError: {NO_ANSWER} before EOF", -signal.SIGABRT],
    "a_dead_peer": [
        DONE,
        f"ERR_RDMA_OP: {RETRIES} Hint:",
        ["PEER_UNREACHABLE", "b", UNREACHABLE],
        FLUSHED,
        0,
        DONE,
    ],
    "a_fault_of_the_card": [
        "LOCAL_QP_ERROR",
        "b",
        "IBV_EVENT_QP_FATAL",
        "ERR_RDMA_OP: EP is degraded, rejecting new submissions",
    ],
    "no_gpu": ENDS + "255",
    "no_port": (
        "RuntimeError: no active RDMA device on this host; set MORI_DISABLE_AUTO_XGMI=0 to enable XGMI-only fallback"
    ),
    "no_port_and_no_second_gpu": (
        "RuntimeError: no active RDMA device and no usable GPU P2P; cannot create any backend"
    ),
    "no_gpu_for_xgmi": "taken",
    "busy_port": ENDS + "255",
    "address_of_another_machine": ENDS + "255",
    "host_name": "localhost",
    "memory_that_cannot_be_pinned": ENDS + "-6",
    "more_memory_than_may_be_pinned": ENDS + "-6",
}
UNDEFINED = {
    "session_after_its_engine": "a session has a pointer to its engine: the library crashes, or does not",
    "status_that_is_dropped_in_flight": "the library writes to memory that was freed: later transfers may never end",
}
"""What the simulator ends its process for, and says so. The library is not asked: its behaviour is undefined."""


def ask(names: Sequence[str], path: str) -> list[Any]:
    """The answers of whichever MoRI is found first on ``path``, and how its process ended, if it did not answer."""
    done = subprocess.run(
        [sys.executable, questions.__file__, *names],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    found = [json.loads(line)["answer"] for line in done.stdout.splitlines() if line.startswith('{"answer": ')]
    assert done.returncode == 0 or len(names) == 1, done.stderr
    return found if done.returncode == 0 else [f"{ENDS}{done.returncode}"]


TOGETHER = [name for name in ANSWERS if name not in questions.ALONE]
absent = pytest.mark.skipif(not REAL, reason="the real MoRI is not installed")
libraries = pytest.mark.parametrize(
    "real",
    [
        pytest.param(False, id="simulator"),
        pytest.param(True, id="real", marks=[absent, changes_the_card]),
    ],
)


@pytest.fixture(scope="module")
def found() -> dict[bool, dict[str, Any]]:
    """What each library said to the questions that are asked together."""
    return {}


@libraries
@pytest.mark.parametrize("name", TOGETHER)
def test_answers(name: str, real: bool, found: dict[bool, dict[str, Any]]) -> None:
    if real not in found:
        found[real] = dict(zip(TOGETHER, ask(TOGETHER, "" if real else str(SIMULATOR)), strict=True))
    assert found[real][name] == ANSWERS[name]


@libraries
@pytest.mark.parametrize("name", sorted(questions.ALONE - UNDEFINED.keys()))
def test_answers_of_a_process_of_its_own(name: str, real: bool) -> None:
    assert ask([name], "" if real else str(SIMULATOR)) == [ANSWERS[name]]


@pytest.mark.parametrize("name", UNDEFINED)
def test_what_the_simulator_ends_its_process_for(name: str) -> None:
    assert ask([name], str(SIMULATOR)) == [ENDS + "-6"], UNDEFINED[name]


def test_it_is_found_only_on_request() -> None:
    code = "import importlib.util; found = importlib.util.find_spec('mori'); print(found and found.origin)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert str(SIMULATOR) not in done.stdout
