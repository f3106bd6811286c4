"""What the kernel still holds of a dead prefill's lands over TCP, and the link gives no memory back before."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

import statelink
from statelink import state

pytestmark = pytest.mark.usefixtures("simulated")

CONFIG: dict[str, Any] = {
    "backend": "mori",
    "options": {"backends": {"TCP": {}}},
    "inspect": False,
    "heartbeat": 0.25,
    "liveness": 2.0,
}
PREFILL = f"""
import sys, numpy as np, statelink
from statelink import state
rows = np.full((4, 1024), 7, np.uint8)
link = statelink.open({{"role": "prefill", **{CONFIG!r}}}, state.describe("p", [state.aux_rows({{"row": rows}})]))
print(link.address, flush=True)
sending = link.send(1, 1)
sending.push({{"aux": [2]}})
sys.stdin.read()
"""
LATE = 2.5
"""Seconds after which bytes land that have arrived: more than the usual time of a fence, and less than is declared."""


def test_memory_comes_back_after_the_bytes_of_a_dead_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target without processor time lands them late."""
    monkeypatch.setenv("MORI_SIM_TCP", "1")
    from mori import simulated

    arrived = threading.Event()

    def land_late() -> None:
        arrived.set()
        time.sleep(LATE)

    monkeypatch.setattr(simulated, "delay", land_late)
    rows = np.zeros((4, 1024), np.uint8)
    inventory = state.describe("d", [state.aux_rows({"row": rows})])
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{PREFILL}"]
    with (
        statelink.open({"role": "decode", **CONFIG}, inventory) as decode,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as prefill,
    ):
        assert prefill.stdout is not None
        receiving = decode.receive(1, prefill.stdout.readline().strip(), 1, {"aux": [3]}, deadline=60)
        assert arrived.wait(30)
        prefill.kill()
        deadline = time.monotonic() + 60
        while not receiving.quiesced and time.monotonic() < deadline:
            time.sleep(0.01)
        landed = rows.copy()
        assert receiving.quiesced
        assert (landed[3] == 7).all()
        assert not landed[:3].any()
