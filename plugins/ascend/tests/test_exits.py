"""A process that exits while the library still ends its engine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ENDS = """
import builtins, os, sys, threading, time
from memfabric_hybrid import TransferEngine
from statelink.backend import BackendContext
from statelink_ascend import AscendBackend, Options

ending, closed, library, tasks = threading.Event(), threading.Event(), TransferEngine.destroy, []

def destroy(engine):
    "Runs on a thread of the plugin."
    tasks.append(f"/proc/self/task/{threading.get_native_id()}")
    closed.wait()
    ending.set()
    return library(engine)

class Last:
    "Goes when the interpreter has told its threads to end. Then waits until the library has ended the engine."

    def __del__(self, tasks=tasks, os=os, time=time):
        until = time.monotonic() + 5
        while os.path.exists(tasks[0]) and time.monotonic() < until:
            time.sleep(0.01)

TransferEngine.destroy = destroy
context = BackendContext(link="here", role="decode", host="127.0.0.1", options=Options(connect_timeout=0.01))
AscendBackend(context).close()
builtins._ = Last()  # the first thing that the interpreter drops when it ends
sys.setswitchinterval(10)  # that thread keeps the interpreter until it is in the library
closed.set()
ending.wait()
sys.exit(3)
"""
LATE = """
import sys, threading
from statelink.backend import BackendContext
from statelink_ascend import AscendBackend, Options

def start(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

backend = AscendBackend(BackendContext(link="here", role="decode", host="127.0.0.1", options=Options()))
threading.Thread.start = start
backend.close()
sys.exit(3)
"""


@pytest.mark.parametrize("code", [ENDS, LATE], ids=["waits", "starts no thread"])
def test_an_exit_keeps_its_status(library: dict[str, str], code: str) -> None:
    """Without that, the library aborts the process. With Python 3.12 and newer, `atexit` can start no thread for it."""
    command = [sys.executable, "-c", code]
    env = {**os.environ, **library}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 3, done.stderr[-4000:]
