"""Messages pass between Python and ZeroMQ while the interpreter is kept, and also without the C library."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests.helpers.spinner import spinning

from statelink import wire

ROOT = Path(__file__).parents[2]
CALLS = 500


def test_the_interpreter_is_kept() -> None:
    """A thread that computes gets the interpreter while this one waits for messages, and not while it handles them."""
    prefill = wire.Channel("prefill", "tcp://127.0.0.1:0", advertise="", keys=None, insecure=False)
    decode = wire.Channel("decode", "", advertise="", keys=None, insecure=False)
    decode.dial(prefill.endpoint)
    address, ping = str(prefill.endpoint), wire.Ping(sender="decode", to="prefill")
    decode.send(ping, address)
    assert list(prefill.receive(10.0))
    with spinning() as spinner:
        assert spinner.lost(1, lambda: list(prefill.receive(0.1))) == 1, "the spinner does not run"
        assert spinner.lost(CALLS, lambda: decode.send(ping, address)) == 0
        time.sleep(0.3)
        handled: list[object] = []
        assert spinner.lost(1, lambda: handled.extend(prefill.receive(0.0))) == 0
        assert len(handled) > 1
    prefill.close()
    decode.close()


def test_without_the_c_library() -> None:
    """Everything that the channel's tests check also holds for pyzmq's own calls."""
    quietly = ["-q", "--timeout=60", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    command = [sys.executable, "-m", "tests.wire.unkept", *quietly, "tests/wire/test_channel.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
