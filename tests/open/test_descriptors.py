"""A process that has hardly a file descriptor left: `open` says so, whatever it would have failed at."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("no_configuration")

PROCESS = """
import os, resource
import numpy as np
import statelink
from statelink import state
from statelink.errors import ConfigError

pages = np.zeros((2, 4, 4, 1, 8), np.uint8)
inventory = state.describe("p", [state.kv_pages({0: pages}, heads=1)])
config = {"role": "prefill", "backend": "tcp"}
statelink.open(config, inventory).close()  # everything is imported
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
refused = 0
while True:
    try:
        link = statelink.open(config, inventory)
    except ConfigError as error:
        assert error.code == "config.descriptors", error
        assert "Too many open files" in str(error) and "the process may have 200" in str(error), error
        refused += 1
    else:
        assert link.close()
        break
    os.close(held.pop())
print(refused)
"""


def test_open_says_that_there_are_too_few() -> None:
    """However many there are: the socket library ends the process where some of its own cannot be opened."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROCESS], timeout=100, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
