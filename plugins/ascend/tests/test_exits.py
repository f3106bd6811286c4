"""Two processes that end at once, as a prefill and a decode do whose fleets are stopped together."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ENDS = """
import os, sys
from npu_memory import Memory
from statelink.backend import BackendContext, Region
from statelink_ascend import AscendBackend, Options

role, other = sys.argv[1:]
memory = Memory("npu:0", 1 << 20)
regions = [Region(memory.address, 1 << 20, "npu:0")]
backend = AscendBackend(BackendContext(link=role, role=role, host="127.0.0.1", options=Options()))
from memfabric_hybrid import TransferEngine  # after the backend, which sees to what it prints

TransferEngine.destroy = lambda engine: os._exit(4)
backend.register(regions)
print(backend.descriptor().hex(), flush=True)
backend.connect(other, bytes.fromhex(sys.stdin.readline()), regions)
print("connected", flush=True)
sys.stdin.readline()
backend.close()
sys.exit(3)
"""


def start(role: str, other: str, library: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ENDS, role, other]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env={**os.environ, **library}, text=True, stdin=pipe, stdout=pipe, stderr=pipe)


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.usefixtures("standin")
def test_both_keep_their_exit_status(library: dict[str, str]) -> None:
    """Neither destroys its engine: in about one of a hundred ends, the library would crash one of the two."""
    prefill, decode = both = [start("prefill", "decode", library), start("decode", "prefill", library)]
    try:
        descriptors = [said(each) for each in both]
        for each, descriptor in ((prefill, descriptors[1]), (decode, descriptors[0])):
            tell(each, descriptor)
            assert said(each) == "connected"
        for each in both:
            tell(each, "end")
        done = [each.communicate(timeout=60)[1] for each in both]
        assert [each.returncode for each in both] == [3, 3], done
    finally:
        for each in both:
            each.kill()
            each.communicate()
