"""The simulated ``memfabric_hybrid`` against what is known of the library: a test for each clause."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from plugins.ascend.simulator.tests.ascend_process import PAGE, SIMULATOR, Engine, Process

if TYPE_CHECKING:
    from pathlib import Path

URL, ANY = "tcp://127.0.0.1:0", "127.0.0.1:0"
INVALID = -2000
CONTACT = 0.4
"""Seconds that stand for two minutes."""
SETTINGS = {"MEMFABRIC_SIM_CONTACT_S": str(CONTACT), "MEMFABRIC_SIM_PUBLISH_S": "0.2"}
UNBOUND = "127.0.0.1:3"


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, Process]]:
    folder = tmp_path_factory.mktemp("memory")
    both = Process(folder / "npu-left", **SETTINGS), Process(folder / "npu-right", **SETTINGS)
    yield both
    for each in both:
        each.end()


@pytest.fixture
def left(processes: tuple[Process, Process]) -> Iterator[Process]:
    yield processes[0]
    processes[0].clean()


@pytest.fixture
def right(processes: tuple[Process, Process]) -> Iterator[Process]:
    yield processes[1]
    processes[1].clean()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Process]:
    """One more process, which may come to harm."""
    process = Process(tmp_path / "npu-other", **SETTINGS)
    yield process
    process.end()


def connected(left: Process, right: Process) -> tuple[Engine, Engine]:
    """A Prefill on the left that has written a byte to a Decode on the right; both registered their first page."""
    prefill, decode = left.engine("Prefill"), right.engine("Decode")
    assert prefill.register_memory(left.address, PAGE) == decode.register_memory(right.address, PAGE) == 0
    assert prefill.transfer_sync_write(decode.session, left.address, right.address, 1) == 0
    return prefill, decode


def soon(call: Any, *arguments: Any) -> Any:
    """What a call returns once it is not refused any more."""
    until = time.monotonic() + 5
    while (code := call(*arguments)) == INVALID and time.monotonic() < until:
        time.sleep(0.02)
    return code


@pytest.mark.parametrize("url", ["tcp://nothere:1", "bogus", ""])
def test_of_the_stores_url_only_the_scheme_counts(left: Process, right: Process, url: str) -> None:
    """So the two sides need not share one, and neither is there a store behind it."""
    decode = right.engine()
    assert decode.initialize(url, ANY, "Decode", 0) == 0
    assert decode.register_memory(right.address, PAGE) == 0
    assert left.engine("Prefill").transfer_sync_write(decode.session, left.address, right.address, 1) == 0


def test_a_second_start_strands_the_first(left: Process, right: Process) -> None:
    prefill, decode = connected(left, right)
    before = decode.session
    assert decode.initialize(URL, ANY, "Decode", 0) == 0
    assert decode.session != before
    assert left.engine("Prefill").transfer_sync_write(before, left.address, right.address, 1) == -1
    assert prefill.transfer_sync_write(before, left.address, right.address, 1) == -1


def test_decode_has_to_be_there_and_to_have_registered(left: Process, right: Process) -> None:
    prefill, decode = left.engine("Prefill"), right.engine("Decode")
    session = decode.session
    assert prefill.transfer_sync_write(session, left.address, right.address, 1) == INVALID
    assert prefill.text == ""
    assert decode.register_memory(right.address, PAGE) == 0
    assert soon(prefill.transfer_sync_write, session, left.address, right.address, 1) == 0


def test_engines_of_one_process_cannot_reach_each_other(left: Process) -> None:
    prefill, decode = left.engine("Prefill"), left.engine("Decode")
    assert prefill.register_memory(left.address, PAGE) == decode.register_memory(left.address, PAGE) == 0
    assert prefill.transfer_sync_write(decode.session, left.address, left.address + 1, 1) == INVALID
    assert prefill.text == ""


def test_connecting_comes_before_every_check_of_the_lists(left: Process, right: Process) -> None:
    """Also with empty lists: that connects, and moves nothing."""
    prefill, decode = left.engine("Prefill"), right.engine("Decode")
    assert decode.register_memory(right.address, PAGE) == prefill.register_memory(left.address, PAGE) == 0
    assert prefill.batch_transfer_sync_write(UNBOUND, [], [], []) == -1
    assert prefill.batch_transfer_sync_write(decode.session, [], [], []) == INVALID
    assert soon(decode.transfer_sync_read, prefill.session, right.address, left.address, 1) == 0


def test_everything_is_checked_before_anything_moves(left: Process, right: Process) -> None:
    prefill, decode = connected(left, right)
    left.memory[:8] = 1
    far = [right.address, right.address + PAGE]
    assert prefill.batch_transfer_sync_write(decode.session, [left.address] * 2, far, [8, 8]) == INVALID
    assert not right.memory.any()


def test_ranges_are_widened_to_pages(left: Process, right: Process) -> None:
    """A peer may write what was never registered, up to the ends of its pages of 2 MiB; not beyond."""
    prefill, decode = left.engine("Prefill"), right.engine("Decode")
    assert decode.register_memory(right.address + PAGE + 1000, 10) == 0
    left.memory[:3] = 4
    for offset, code in ((PAGE - 1, INVALID), (PAGE, 0), (2 * PAGE - 3, 0), (2 * PAGE - 2, INVALID)):
        assert prefill.transfer_sync_write(decode.session, left.address, right.address + offset, 3) == code
    assert right.memory[PAGE : PAGE + 3].tolist() == right.memory[2 * PAGE - 3 : 2 * PAGE].tolist() == [4, 4, 4]


def test_ranges_of_one_batch_that_overlap_once_widened_become_one(left: Process, right: Process) -> None:
    """Those that only touch do not, and neither do those of different calls."""
    prefill, decode = left.engine("Prefill"), right.engine("Decode")
    base = right.address
    assert decode.batch_register_memory([base + PAGE + 5, base + 2 * PAGE + 5, base + 10], [PAGE, 10, 10]) == 0
    write = prefill.transfer_sync_write
    assert write(decode.session, left.address, base + 2 * PAGE - 2, 4) == 0
    assert write(decode.session, left.address, base + PAGE - 2, 4) == INVALID
    assert write(decode.session, left.address, base + 3 * PAGE - 2, 4) == INVALID


def test_late_registration_is_visible_after_a_while(left: Process, right: Process, other: Process) -> None:
    """To peers that are connected; one that comes later sees it at once."""
    prefill, decode = connected(left, right)
    late = right.address + 3 * PAGE
    assert decode.register_memory(late, PAGE) == 0
    assert prefill.transfer_sync_write(decode.session, left.address, late, 1) == INVALID
    assert other.engine("Prefill").transfer_sync_write(decode.session, other.address, late, 1) == 0
    assert soon(prefill.transfer_sync_write, decode.session, left.address, late, 1) == 0


def test_first_contact_with_nobody_blocks(left: Process) -> None:
    """For two minutes, really; other threads run meanwhile."""
    code, ticks, seconds = left.engine("Prefill").ticks(
        "transfer_sync_write", "127.0.0.1:65530", left.address, left.address, 1
    )
    assert code == -1
    assert seconds >= CONTACT
    assert ticks > 5


def test_first_contacts_are_made_one_after_the_other(left: Process, right: Process, other: Process) -> None:
    """One with a living peer waits for one with nobody; what is connected already waits for neither."""
    prefill, known = connected(left, other)
    decode = right.engine("Decode")
    assert decode.register_memory(right.address, PAGE) == 0
    nobody, living, connected_already = prefill.at_once(
        CONTACT / 4,
        ("transfer_sync_write", UNBOUND.replace(":3", ":65530"), left.address, left.address, 1),
        ("transfer_sync_write", decode.session, left.address, right.address, 1),
        ("transfer_sync_write", known.session, left.address, other.address, 1),
    )
    assert (nobody[0], living[0], connected_already[0]) == (-1, 0, 0)
    assert nobody[1] >= CONTACT
    assert living[1] >= CONTACT / 2
    assert connected_already[1] < CONTACT / 2


def test_nobody_finds_the_simulator_by_accident() -> None:
    code = "import importlib.util as u; print((u.find_spec('memfabric_hybrid') or u.find_spec('os')).origin)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert str(SIMULATOR) not in done.stdout
