"""What proves that a process has ended, over real processes; and what does not."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.helpers.engine import Engine
from tests.helpers.peers import until

from statelink.link.peers._process import Witness, this_process

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helpers.worker import Host

    from statelink.wire import ProcessId

HERE = "tcp://127.0.0.1:1"


class Child:
    """A process that has said who it is."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.process = engine.popen
        self.stated: ProcessId | None = engine.run("statelink.link.peers._process", "this_process")

    @property
    def id(self) -> ProcessId:
        assert self.stated is not None
        return self.stated

    def witness(self, address: str = HERE, **other: object) -> Witness | None:
        return Witness.of(msgspec.structs.replace(self.id, **other), address)


@pytest.fixture
def child(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Child]:
    """Its parameter is a command that runs it in another place."""
    engine = Engine(tmp_path, "child", getattr(request, "param", ()))
    yield Child(engine)
    engine.kill()


def exited(pid: int) -> bool:
    """Whether a child of ours has ended, without reaping it."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return found is not None and found.si_pid == pid


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_a_process_that_lives_or_is_stopped_has_not_ended(child: Child) -> None:
    witness = child.witness()
    assert witness is not None
    assert not witness.ended()
    child.process.send_signal(signal.SIGSTOP)
    until(lambda: state(child.id.pid) == "T")
    assert not witness.ended()


def test_a_process_that_was_killed_has_ended_before_and_after_it_is_reaped(child: Child) -> None:
    witness = child.witness()
    assert witness is not None
    child.process.kill()
    until(lambda: exited(child.id.pid))
    assert state(child.id.pid) == "Z"
    assert witness.ended()
    child.process.wait()
    assert witness.ended()
    assert child.witness() is None, "nothing can be said of who is not here at the greeting"


def leave_a_thread(_: Host) -> None:
    """Runs in the child: its main thread ends, and another one stays."""
    threading.Thread(target=time.sleep, args=(60,)).start()
    ctypes.CDLL(None).pthread_exit(None)


def test_a_main_thread_that_ended_is_not_the_end_of_its_process(child: Child) -> None:
    witness = child.witness()
    assert witness is not None
    child.engine.start(leave_a_thread)
    until(lambda: state(child.id.pid) == "Z")
    time.sleep(0.05)
    assert not witness.ended()
    child.process.kill()
    until(lambda: exited(child.id.pid))
    assert witness.ended()


def test_an_id_that_another_process_has_by_now(child: Child) -> None:
    assert Witness(child.id.pid, child.id.start - 1).ended()


def test_who_is_not_of_this_host_has_no_witness(child: Child) -> None:
    assert child.witness() is not None
    assert child.witness(boot="00000000-0000-0000-0000-000000000000") is None
    assert child.witness(pid_namespace=child.id.pid_namespace + 1) is None
    assert child.witness(start=child.id.start + 1) is None
    assert child.witness(pid=2**31 - 1) is None
    for elsewhere in ("tcp://192.0.2.7:1", "tcp://[2001:db8::7]:1", "tcp://nobody.invalid:1"):
        assert child.witness(elsewhere) is None, elsewhere
    assert Witness.of(None, HERE) is None


@pytest.mark.parametrize("child", [("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")], indirect=True)
def test_a_process_of_another_pid_namespace_is_never_taken_for_ours(root: None, child: Child) -> None:
    ours = this_process()
    assert ours is not None
    assert child.id.boot == ours.boot
    assert child.id.pid_namespace != ours.pid_namespace
    assert child.witness() is None


@pytest.mark.parametrize("child", [("unshare", "--pid", "--fork", "--kill-child")], indirect=True)
def test_who_sees_the_processes_of_another_namespace_says_nothing(root: None, child: Child) -> None:
    """Its ``/proc`` is not its own: what stands there under its id is someone else."""
    assert child.stated is None
