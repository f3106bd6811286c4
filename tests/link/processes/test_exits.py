"""An engine that ends without closing its links, with transfers in flight, exits as it would without them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

BUSY = """
import atexit, gc, os, signal, sys, threading
import numpy as np
import statelink
from statelink import Status, state
from statelink.errors import StatelinkError

BACKEND = sys.argv[1]
PAGES, TOKENS = range(1024), 1024 * 16

def opened(role):
    pages = [np.zeros((len(PAGES), 16, 2, 64), np.uint16) for _ in range(4)]
    inventory = state.describe(role, [state.kv_pages({0: tuple(pages[:2]), 1: tuple(pages[2:])}, heads=2)])
    config = {"role": role, "backend": BACKEND, "inspect": False, "deadline": 60.0}
    return pages, statelink.open(config, inventory)

def busy():
    "Two links with 20 rooms of 16 MiB each, one of which has begun."
    (mine, prefill), (theirs, decode) = opened("prefill"), opened("decode")
    rooms = []
    for room in range(1, 21):
        rooms.append(decode.receive(room, prefill.address, TOKENS, {"kv": PAGES}))
        sending = prefill.send(room, TOKENS)
        sending.push({"kv": PAGES})
    while rooms[0].status in (Status.BOOTSTRAPPING, Status.WAITING):
        decode.changes(1.0)
    return mine, theirs, prefill, decode, rooms
"""
WAYS: dict[str, tuple[str, int, str]] = {
    "returns": ("all = busy()", 0, ""),
    "exits": ("all = busy(); sys.exit(3)", 3, ""),
    "raises": ("all = busy(); raise KeyError('the engine')", 1, "KeyError: 'the engine'"),
    "is interrupted": (
        "all = busy(); os.kill(os.getpid(), signal.SIGINT); threading.Event().wait(30)",
        -signal.SIGINT,
        "KeyboardInterrupt",
    ),
    "is told to end": (
        "signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(5))\n"
        "all = busy(); os.kill(os.getpid(), signal.SIGTERM); threading.Event().wait(30)",
        5,
        "",
    ),
    "has dropped its handles": ("busy(); gc.collect(); sys.exit(3)", 3, ""),
    "closes in atexit": ("all = busy(); atexit.register(all[2].close); sys.exit(3)", 3, ""),
    "has a thread that goes on": (
        """
all = busy()
began = threading.Event()
def go_on():
    try:
        for room in range(100, 100000):
            all[2].send(room, 16).abort()
            all[3].changes()
            began.set()
    except StatelinkError as error:
        print(error.code, flush=True)
threading.Thread(target=go_on, daemon=True).start()
began.wait(30)
sys.exit(3)
""",
        3,
        "",
    ),
    "has a thread that opens a link": (
        """
all = busy()
began = threading.Event()
def go_on():
    try:
        while True:
            began.set()
            opened("prefill")[1].close()
    except StatelinkError as error:
        print(error.code, flush=True)
threading.Thread(target=go_on, daemon=True).start()
began.wait(30)
sys.exit(3)
""",
        3,
        "",
    ),
    "is a forked child's parent": (
        """
all = busy()
child = os.fork()
if child == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
sys.exit(3)
""",
        3,
        "",
    ),
    "is a child of multiprocessing": (
        """
import multiprocessing
def child():
    global all
    all = busy()
    sys.exit(7)
for how in ("fork", "spawn"):
    if __name__ == "__main__":
        process = multiprocessing.get_context(how).Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 7, (how, process.exitcode)
if __name__ == "__main__":
    sys.exit(3)
""",
        3,
        "",
    ),
}
MOST = [("nixl", way) for way in WAYS if way not in ("returns", "closes in atexit", "is a child of multiprocessing")]
"""What `make test` runs beside one way over each backend. NIXL's calls are the ones that most often hold a thread."""


def run(tmp_path: Path, backend: str, code: str, before: str = "") -> subprocess.CompletedProcess[str]:
    program = tmp_path / "engine.py"
    program.write_text(before + BUSY + textwrap.dedent(code))
    clean = {key: value for key, value in os.environ.items() if not key.startswith("STATELINK_")}
    command = [sys.executable, str(program), backend]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=clean, check=False)


def check(done: subprocess.CompletedProcess[str], status: int, said: str) -> None:
    assert done.returncode == status, done.stderr[-4000:]
    assert said in done.stderr
    for word in ("terminate called", "Fatal Python error", "atexit"):
        assert word not in done.stderr, done.stderr[-4000:]
    if not said:
        assert "Traceback" not in done.stderr, done.stderr[-4000:]


@pytest.mark.parametrize(
    ("backend", "way"),
    [
        pytest.param(backend, way, marks=() if way == "exits" or (backend, way) in MOST else pytest.mark.soak)
        for backend in ("tcp", "nixl", "mooncake")
        for way in WAYS
    ],
    indirect=["backend"],
    scope="session",
)
def test_an_engine_that_ends_keeps_its_exit_status(tmp_path: Path, backend: str, way: str) -> None:
    code, status, said = WAYS[way]
    check(run(tmp_path, backend, code), status, said)


HELD = """
import builtins, subprocess, time
from mooncake.engine import TransferEngine
from statelink.errors import ClosedError

if len(sys.argv) > 2:
    theirs, decode = opened("decode")
    room = decode.receive(1, sys.argv[2], TOKENS, {"kv": PAGES})
    sys.stdin.read()  # until the other process has ended
    os._exit(0)

held = []
send_probe = TransferEngine.send_probe

def stop_and_probe(engine, address):
    "The first contact with decode's engine, which waits for an answer."
    decode.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, decode.pid, os.WSTOPPED | os.WNOWAIT)
    held.extend((decode.pid, f"/proc/self/task/{threading.get_native_id()}"))
    return send_probe(engine, address)

class Last:
    "Goes when the interpreter has told its threads to end. Only then the library lets go of the one that it holds."

    def __del__(self, held=held, go_on=signal.SIGCONT, os=os, time=time):
        os.kill(held[0], go_on)
        until = time.monotonic() + 2  # that thread may wait for the end of the process
        while os.path.exists(held[1]) and time.monotonic() < until:
            time.sleep(0.01)
        os.write(1, b"went on")

builtins._ = Last()  # the first thing that the interpreter drops when it ends
TransferEngine.send_probe = stop_and_probe
mine, prefill = opened("prefill")
command = [sys.executable, __file__, BACKEND, prefill.address]
decode = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
while not held:
    time.sleep(0.01)
"""
EARLY = """
import atexit
EARLY = []
atexit.register(lambda: [each() for each in EARLY])  # runs after all that is registered later
"""
IMPATIENT = """
def interrupt():
    try:
        for room in range(100, 100000):
            prefill.send(room, 16).abort()
    except ClosedError:
        os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("backend", "end"),
    [
        pytest.param("mooncake", IMPATIENT, id="interrupted"),
        pytest.param("mooncake", "sys.exit(3)", id="in time", marks=pytest.mark.soak),
    ],
    indirect=["backend"],
    scope="session",
)
def test_a_thread_that_a_library_holds_does_not_change_the_exit_status(tmp_path: Path, backend: str, end: str) -> None:
    """Its peer is stopped. The peer goes on, and the library's call returns, after the link has given up waiting."""
    done = run(tmp_path, backend, HELD + end)
    assert done.returncode == 3, done.stderr[-4000:]
    assert done.stdout == "went on"
    for word in ("terminate called", "Fatal Python error"):
        assert word not in done.stderr, done.stderr[-4000:]


@pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")
def test_an_exit_that_can_start_no_thread_closes_the_links(tmp_path: Path, backend: str) -> None:
    """As with Python 3.12 and newer, where no thread starts once `atexit` runs."""
    code = """
all = busy()

def refuse():
    def start(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")
    threading.Thread.start = start

EARLY.append(lambda: print(sorted(each.name for each in threading.enumerate()), flush=True))
atexit.register(refuse)
sys.exit(3)
"""
    done = run(tmp_path, backend, code, before=EARLY)
    check(done, 3, "")
    assert done.stdout == "['MainThread']\n"


@pytest.mark.parametrize(
    ("goes_on", "said"), [(True, ""), (False, "WARNING the process ends while the thread the-end is in a library\n")]
)
def test_an_exit_waits_for_what_a_backend_has_left_in_its_library(tmp_path: Path, goes_on: bool, said: str) -> None:
    """As with a library that ends after `close`. The exit names a thread for which it has waited long enough."""
    code = f"""
import atexit, logging, sys, threading
logging.basicConfig(format="%(levelname)s %(message)s")
end = threading.Event()
atexit.register(lambda: print(thread.is_alive(), flush=True))
from statelink.backend import leave_in_library
thread = threading.Thread(target=end.wait, name="the-end", daemon=True)
thread.start()
leave_in_library(thread)
if {goes_on}:
    atexit.register(end.set)
sys.exit(3)
"""
    program = tmp_path / "engine.py"
    program.write_text(code)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stdout) == (3, f"{not goes_on}\n")
    assert done.stderr == said
