"""A core of its own for the thread that computes."""

from __future__ import annotations

import os
import subprocess

import pytest
from benchmarks import cores


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is only one core")
def test_a_thread_has_a_core_that_no_other_one_has() -> None:
    with (
        subprocess.Popen(["sleep", "60"]) as computes,
        subprocess.Popen(["sleep", "60"]) as beside,
        subprocess.Popen(["true"]) as ended,
    ):
        try:
            ended.wait()
            cores.set_apart(computes.pid, [beside.pid, ended.pid, computes.pid])
            own, others = os.sched_getaffinity(computes.pid), os.sched_getaffinity(beside.pid)
            assert len(own) == 1
            assert own | others == os.sched_getaffinity(0)
            assert not own & others
        finally:
            computes.kill()
            beside.kill()
