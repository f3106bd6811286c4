"""What the plugin takes for granted of NIXL and its UCX, asked of the library itself, one question a test.

Each docstring says which part of the plugin relies on the answer. If a test fails with another release of NIXL, look at
that part: it may be wrong with that release, or not needed. What the plugin's other tests and the kit notice is tested
there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
from plugins.nixl.tests.bare import MIB, SMALL, Far, Near, error, far, finish, listing

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NIXL is not installed: pip install nixl"
)

SPLIT = 1024
LARGE = 64 * MIB
SECONDS = 60.0
TIMES = 5


@pytest.fixture(autouse=True)
def _as_the_plugin_starts_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_RESOLVE_REMOTE_EP_ID", "off")
    monkeypatch.delenv("UCX_TLS", raising=False)


@pytest.fixture
def _over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy")


over_tcp = pytest.mark.usefixtures("_over_tcp")


@pytest.fixture(scope="module")
def _process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    with far(tmp_path_factory.mktemp("claims"), nbytes=LARGE) as found:
        yield found


@pytest.fixture
def peer(_process: Far) -> Iterator[Far]:
    """The other process. It goes on after each test, with memory of zeros."""
    yield _process
    _process.go_on()
    _process.array[:] = 0


def connected(peer: Far, nbytes: int = MIB) -> Near:
    """An agent here that reaches a peer."""
    near = Near("near", nbytes)
    near.agent.add_remote_agent(peer.metadata)
    near.write(peer)
    return near


def sockets() -> set[str]:
    """This process's sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            found |= {name} if link.startswith("socket:") else set()
    return found


def reconnect(near: Near, peer: Far) -> None:
    """Load a peer, write to it, and remove it, `TIMES` times."""
    for _ in range(TIMES):
        near.agent.add_remote_agent(peer.metadata)
        near.write(peer)
        near.agent.remove_remote_agent(peer.name)


def left(before: int) -> int:
    """How many more sockets there are, once few enough are closed or two seconds are over.

    An agent connects to itself when it is made. A socket or two of that may come after `before` was counted.
    """
    until = time.monotonic() + 2
    while len(sockets()) - before >= TIMES and time.monotonic() < until:
        time.sleep(0.02)
    return len(sockets()) - before


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("NIXL_", "UCX_"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**known, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


# The import.


def test_importing_it_turns_off_the_exceptions_of_logging() -> None:
    """`_library.Library` turns them on again."""
    code = "import logging, nixl._api, os; print(logging.raiseExceptions, flush=True); os._exit(0)"
    assert in_a_process(code, NIXL_LOG_LEVEL="FATAL").stdout.split() == ["False"]


def test_the_front_asks_a_function_for_the_version_of_cuda() -> None:
    """`_library._torch_left_out` replaces the function, so that torch is not imported; `_diagnosis` calls it."""
    code = """
import os, nixl_meta_utils
real, asked = nixl_meta_utils.detect_cuda_major, []
assert callable(nixl_meta_utils._torch_cuda_version_from_disk)
nixl_meta_utils.detect_cuda_major = lambda: asked.append(1)
import nixl
print(len(asked), flush=True)
os._exit(0)
"""
    done = in_a_process(code, NIXL_LOG_LEVEL="FATAL")
    assert done.stdout.split() == ["1"], done.stderr


BROKEN = """
import os, nixl._api as api
try:
    api.nixl_agent("a", api.nixl_agent_config(backends=[])).create_backend("NONE", {})
except Exception as error:
    assert type(error) in vars(api.nixlBind).values()
    os._exit(7)
"""


@pytest.mark.parametrize(("level", "prints"), [("FATAL", False), ("INFO", True)])
def test_it_prints_what_it_raises_unless_the_level_is_fatal(level: str, prints: bool) -> None:
    """`_library._prepare_environment` sets the level, and `_backend.PRINT` advises another one."""
    done = in_a_process(BROKEN, NIXL_LOG_LEVEL=level)
    assert done.returncode == 7, done.stderr
    assert bool(done.stdout + done.stderr) is prints


# Agents.


def test_the_python_api_has_the_progress_thread_never_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_library._paced` sets another pause, at the place where the API sets 0."""
    Near("before", SMALL)  # prepares the environment, and imports NIXL
    import nixl._api as api

    real, told = api.nixlBind.nixlAgentConfig, []

    class Noted(real):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: object) -> None:
            told.append((name, value))
            super().__setattr__(name, value)

    monkeypatch.setattr(api.nixlBind, "nixlAgentConfig", Noted)
    Near("rests", SMALL)
    assert ("pthrDelay", 0) in told


def test_an_unknown_parameter_is_ignored_and_so_are_devices() -> None:
    """So `Options.devices` is UCX's NET_DEVICES, and the plugin's README says that nobody checks the parameters."""
    Near("carefree", SMALL, no_such_parameter="1", ucx_devices="no_such_device")


def test_memory_may_be_registered_twice() -> None:
    """Every agent of a process registers `_library.SCRATCH`, and an engine's regions may lie in one another."""
    near = Near("twice")
    near.add(near.array)
    near.add(near.array[: near.array.nbytes // 2])


def test_a_region_adds_some_45_bytes_to_the_metadata() -> None:
    """`NixlBackend.descriptor` says so."""
    near = Near("wordy")
    before = len(near.agent.get_agent_metadata())
    arrays = [np.zeros(SMALL, np.uint8) for _ in range(100)]
    for array in arrays:
        near.add(array)
    assert 40 <= (len(near.agent.get_agent_metadata()) - before) / len(arrays) <= 50


# Remote agents.


def test_a_remote_agent_is_called_by_the_name_in_its_metadata(peer: Far) -> None:
    """`NixlBackend._load` compares it with the peer's name."""
    assert Near("near").agent.add_remote_agent(peer.metadata) in (peer.name, peer.name.encode())


def test_a_remote_agent_is_loaded_again_only_after_it_was_removed(tmp_path: Path) -> None:
    """`NixlBackend.connect` removes an earlier connection first."""
    with far(tmp_path, "again") as first:
        near = connected(first)
    with far(tmp_path, "again") as second:
        with pytest.raises(error("nixlNotAllowedError")):
            near.agent.add_remote_agent(second.metadata)
        near.agent.remove_remote_agent("again")
        near.agent.add_remote_agent(second.metadata)
        near.write(second)


def test_an_unknown_remote_agent_can_be_removed() -> None:
    """`NixlBackend._load` removes what may have been loaded in part."""
    Near("near").agent.remove_remote_agent("nobody")


def test_damaged_metadata_spoils_the_name(peer: Far) -> None:
    """`_tables.Descriptor` has a checksum, which is compared before NIXL sees the metadata."""
    near = Near("near")
    with pytest.raises(error("nixlNotFoundError")):
        near.agent.add_remote_agent(peer.metadata[:-1])
    with pytest.raises(error("nixlInvalidParamError")):
        near.agent.add_remote_agent(peer.metadata)


@over_tcp
def test_a_peer_that_does_not_answer_can_be_loaded(peer: Far) -> None:
    """`NixlBackend._greet` writes to a new peer, and waits until it took the bytes."""
    near = Near("near")
    peer.stop()
    near.agent.add_remote_agent(peer.metadata)
    handle = near.handle(peer)
    assert near.agent.transfer(handle) == "PROC"
    peer.go_on()
    finish(near.agent, handle, "PROC")


@pytest.mark.parametrize("tls", ["all", "tcp,cuda_copy"])
@pytest.mark.parametrize(("resolve", "leaves"), [("off", False), ("auto", True)])
def test_sockets_of_a_removed_agent_stay_if_ucx_asks_for_endpoints(
    tls: str, resolve: str, leaves: bool, peer: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`_library.RESOLVING` tells it not to."""
    monkeypatch.setenv("UCX_TLS", tls)
    monkeypatch.setenv("UCX_RESOLVE_REMOTE_EP_ID", resolve)
    near = Near("near")
    before = len(sockets())
    reconnect(near, peer)
    assert (left(before) >= TIMES) is leaves


def test_a_thread_closes_connections_only_while_it_has_a_part(peer: Far) -> None:
    """`_threads.Threads.close_connections` gives it one after a remote agent was removed."""
    near = Near("near", num_threads="1")
    before = len(sockets())
    reconnect(near, peer)
    assert left(before) >= TIMES
    here = near.array.ctypes.data
    ends = listing(here, SPLIT), listing(here + SPLIT * SMALL, SPLIT)
    agent = near.agent
    own = agent.initialize_xfer("WRITE", *(agent.get_xfer_descs(each, "DRAM") for each in ends), "near")
    finish(agent, own, agent.transfer(own))
    assert left(before) < TIMES


# Transfers.


@pytest.mark.parametrize("side", ["here", "there"])
def test_a_block_outside_of_registered_memory_is_refused_at_once(side: str, peer: Far) -> None:
    """`NixlBackend._post` says that such a transfer did not start."""
    near = connected(peer)
    here, there = listing(near.array.ctypes.data), listing(peer.address)
    side_of, end = (here, near.array.nbytes) if side == "here" else (there, peer.array.nbytes)
    side_of[:, 0] += end - SMALL + 1
    agent = near.agent
    with pytest.raises(error("nixlNotFoundError")):
        agent.initialize_xfer("WRITE", agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM"), "far")


def test_a_list_of_blocks_is_copied(peer: Far) -> None:
    """`NixlBackend._post` lets go of the arrays while transfers are in progress."""
    near = connected(peer)
    near.array[:SMALL], near.array[SMALL : 2 * SMALL] = 1, 2
    here, there = listing(near.array.ctypes.data), listing(peer.address)
    agent = near.agent
    near_list, far_list = (agent.get_xfer_descs(each, "DRAM") for each in (here, there))
    here[:, 0] += SMALL
    there[:, 0] += SMALL
    handle = agent.initialize_xfer("WRITE", near_list, far_list, "far")
    finish(agent, handle, agent.transfer(handle))
    assert (peer.array[:SMALL] == 1).all()
    assert not peer.array[SMALL:].any()


def test_a_handle_can_be_released_twice(peer: Far) -> None:
    """`NixlBackend.close` may release what `_ended` released."""
    near = connected(peer)
    handle = near.handle(peer)
    finish(near.agent, handle, near.agent.transfer(handle))
    handle.release()
    handle.release()


def test_on_one_host_the_posting_call_copies_even_into_a_stopped_process(peer: Far) -> None:
    """`NixlBackend.capabilities`: ``submit_mode`` and ``stalled_peers``."""
    near = connected(peer, LARGE)
    near.array[:] = 3
    peer.stop()
    handle = near.handle(peer, 16, LARGE // 16)
    state = near.agent.transfer(handle)
    assert (peer.array == 3).all()
    # On some connections the flush behind the copy waits for the peer. The call has returned all the same.
    peer.go_on()
    finish(near.agent, handle, state)


def test_the_posting_call_lets_go_of_the_interpreter(peer: Far) -> None:
    """Control threads run while a data thread posts: `NixlBackend` declares BLOCKING, and not that it holds them up."""
    near = connected(peer, LARGE)
    handle = near.handle(peer, 16, LARGE // 16)
    counted, over = [0], threading.Event()

    def count() -> None:
        while not over.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    before = counted[0]
    state = near.agent.transfer(handle)
    after = counted[0]
    over.set()
    thread.join()
    assert state == "DONE"
    assert after - before > 1000


@over_tcp
def test_a_released_transfer_goes_on(peer: Far) -> None:
    """`NixlBackend` keeps handles that are in progress, and its fences are `Fence.MOVER`."""
    near = connected(peer, LARGE)
    near.array[:] = 1
    peer.stop()
    handle = near.handle(peer, 64, LARGE // 64)
    assert near.agent.transfer(handle) == "PROC"
    handle.release()
    near.array[:] = 2
    peer.go_on()
    until = time.monotonic() + SECONDS
    while not (peer.array[-1:] == 2).all() and time.monotonic() < until:
        time.sleep(0.02)
    assert (peer.array == 2).any()


@pytest.mark.parametrize("fewest", [SPLIT, 128])
def test_with_threads_a_batch_is_split_from_so_many_blocks(peer: Far, fewest: int) -> None:
    """`_threads.NIXLS_SPLIT`, `_library.SPLIT`, and how many blocks give each of the threads a part."""
    before = set(os.listdir("/proc/self/task"))
    given = {} if fewest == SPLIT else {"split_batch_size": str(fewest)}
    near = Near("near", LARGE, num_threads="2", **given)
    own = set(os.listdir("/proc/self/task")) - before
    near.agent.add_remote_agent(peer.metadata)
    for _ in range(TIMES):
        near.write(peer, 2 * SPLIT)  # a first part connects, which wakes threads

    def woken(count: int) -> int:
        """Threads of the agent that slept before a transfer, and did not while it ran."""
        time.sleep(0.02)
        slept = switches(own)
        near.write(peer, count)
        time.sleep(0.02)
        return sum(now != slept[thread] for thread, now in switches(own).items())

    def often(count: int) -> int:
        """The usual number. A thread may also wake for something else."""
        return statistics.mode(woken(count) for _ in range(2 * TIMES + 1))

    assert [often(count) for count in (1, fewest - 1, fewest, 2 * fewest)] == [0, 0, 1, 2]


def switches(threads: set[str]) -> dict[str, int]:
    """How often each thread went to sleep."""
    word = "voluntary_ctxt_switches:"
    found = {}
    for thread in threads:
        with open(f"/proc/self/task/{thread}/status") as lines:
            found[thread] = next(int(line.split()[1]) for line in lines if line.startswith(word))
    return found


# Failures.


@over_tcp
def test_a_broken_connection_is_not_repaired(peer: Far) -> None:
    """`NixlBackend` marks the peer as lost, until it is disconnected and connected again."""
    before = sockets()
    near = connected(peer)
    for name in sockets() - before:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as copy:
            if copy.family == socket.AF_INET and copy.getpeername():
                copy.shutdown(socket.SHUT_RDWR)

    def write_often() -> None:
        for _ in range(1000):
            near.write(peer)

    for _ in range(3):
        with pytest.raises(error("nixlRemoteDisconnectError")):
            write_often()
    near.agent.remove_remote_agent(peer.name)
    near.agent.add_remote_agent(peer.metadata)
    near.write(peer)


BEYOND = """
import numpy as np
from plugins.nixl.tests.bare import Near, listing
near = Near("near")
agent, here = near.agent, near.array.ctypes.data
ends = listing(here), np.array([[here, (1 << 64) - here + 64, 0]], np.uint64)
agent.initialize_xfer("WRITE", *(agent.get_xfer_descs(each, "DRAM") for each in ends), "near")
"""


def test_a_block_beyond_the_address_space_passes_its_checks() -> None:
    """`NixlBackend.submit` checks every block against its region first."""
    done = in_a_process(BEYOND)
    assert done.returncode != 0
    assert "NIXL_ERR" in done.stderr, done.stderr
