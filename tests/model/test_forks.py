"""A process that forks after it opened links: the child's calls raise, and the parent's links go on.

It forks while the locks of its links are held, which only private names can arrange.
"""

from __future__ import annotations

import subprocess
import sys

ENGINE = """
import gc, os, sys
import numpy as np
import statelink
from statelink import Status, state
from statelink.errors import ClosedError

def opened(role):
    pages = np.zeros((2, 4, 4, 1, 8), np.uint8)
    return statelink.open({"role": role, "backend": "tcp"}, state.describe(role, [state.kv_pages({0: pages}, heads=1)]))

def serve(room):
    receiving, sending = decode.receive(room, prefill.address, 4, {"kv": [0]}), prefill.send(room, 4)
    sending.push({"kv": [1]})
    assert (receiving.wait(30), sending.wait(30)) == (Status.SUCCEEDED, Status.SUCCEEDED)

prefill, decode = opened("prefill"), opened("decode")
serve(1)
receiving, sending = decode.receive(2, prefill.address, 4), prefill.send(2, 4)
calls = {
    "send": lambda: prefill.send(3, 4),
    "receive": lambda: decode.receive(3, prefill.address, 4),
    "changes": lambda: prefill.changes(None),
    "snapshot": lambda: decode.snapshot(),
    "push": lambda: sending.push({"kv": [1]}),
    "accept": lambda: receiving.accept({"kv": [0]}),
    "wait": lambda: receiving.wait(None),
    "abort": lambda: sending.abort(),
    "check": lambda: sending.check(),
    "poll": lambda: sending.poll(),
}
with prefill._table._lock, decode._table._lock, sending._lock, receiving._lock:
    child = os.fork()  # while threads of the parent may hold every lock
if child == 0:
    code = 1
    try:
        for name, call in calls.items():
            try:
                call()
            except ClosedError as error:
                assert error.code == "closed.forked", name
            else:
                raise AssertionError(name)
        for each in (sending, receiving, prefill, decode):
            each.close()
        assert prefill.close() and decode.close()
        del each, calls, call, sending, receiving, prefill, decode
        gc.collect()
        code = 0
    finally:
        os._exit(code)
assert os.waitpid(child, 0)[1] == 0
receiving.accept({"kv": [0]})
sending.push({"kv": [1]})
assert (receiving.wait(30), sending.wait(30)) == (Status.SUCCEEDED, Status.SUCCEEDED)
serve(4)
assert prefill._inspection is None or prefill._inspection._path is None or prefill._inspection._path.exists()
assert decode.close() and prefill.close()
"""


def test_a_forked_child_can_neither_use_nor_harm_the_parents_links() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ENGINE], timeout=100, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
