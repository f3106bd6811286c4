"""The simulated ``memfabric_hybrid`` against what is known of the library: a test for each clause."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from plugins.ascend.simulator.tests.ascend_process import PAGE, SIMULATOR, Engine, Process

if TYPE_CHECKING:
    from pathlib import Path

URL, ANY = "tcp://127.0.0.1:0", "127.0.0.1:0"
SDMA, HOST_RDMA, HOST_TCP = 1, 2, 4
INVALID = -2000
CONTACT = 0.4
"""Seconds that stand for two minutes."""
SETTINGS = {"MEMFABRIC_SIM_CONTACT_S": str(CONTACT), "MEMFABRIC_SIM_PUBLISH_S": "0.2"}
UNBOUND = "127.0.0.1:3"
NOT_STARTED = "smem trans not initialized yet"


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


def connected(left: Process, right: Process, *, kind: int = SDMA) -> tuple[Engine, Engine]:
    """A Prefill on the left that has written a byte to a Decode on the right; both registered their first page."""
    prefill, decode = left.engine("Prefill", kind), right.engine("Decode", kind)
    assert prefill.register_memory(left.address, PAGE) == decode.register_memory(right.address, PAGE) == 0
    assert prefill.transfer_sync_write(decode.session, left.address, right.address, 1) == 0
    return prefill, decode


def soon(call: Any, *arguments: Any) -> Any:
    """What a call returns once it is not refused any more."""
    until = time.monotonic() + 5
    while (code := call(*arguments)) == INVALID and time.monotonic() < until:
        time.sleep(0.02)
    return code


def test_bytes_move_both_ways(left: Process, right: Process) -> None:
    """A local address, and the peer's own: also for reads."""
    prefill, decode = connected(left, right)
    left.memory[:5], right.memory[100:103] = range(5), (7, 8, 9)
    assert prefill.batch_transfer_sync_write(decode.session, [left.address], [right.address + 10], [5]) == 0
    assert prefill.transfer_sync_read(decode.session, left.address + 20, right.address + 100, 3) == 0
    assert right.memory[10:16].tolist() == [0, 1, 2, 3, 4, 0]
    assert left.memory[19:24].tolist() == [0, 7, 8, 9, 0]


def test_many_pieces_of_any_size(left: Process, right: Process) -> None:
    prefill, decode = connected(left, right)
    left.memory[:] = np.arange(len(left.memory)) % 251
    sizes = [1 + i % 699 for i in range(3000)]
    near = [left.address + 701 * i for i in range(2990)] + [left.address] * 10
    far = [right.address + 699 * i for i in range(3000)]
    assert prefill.batch_transfer_sync_write(decode.session, near, far, sizes) == 0
    for begin, to, size in zip(near, far, sizes, strict=True):
        start, end = begin - left.address, to - right.address
        assert (right.memory[end : end + size] == left.memory[start : start + size]).all()


def test_the_targets_process_takes_no_part(left: Process, other: Process) -> None:
    prefill, decode = connected(left, other)
    session = decode.session
    other.stop()
    left.memory[:4] = 9
    assert prefill.transfer_sync_write(session, left.address, other.address, 4) == 0
    assert other.memory[:5].tolist() == [9, 9, 9, 9, 0]


@pytest.mark.parametrize("role", ["prefill", "DECODE", "", "Both"])
def test_a_role_is_exactly_prefill_or_decode(left: Process, role: str) -> None:
    """Else -1, without a text, and before anything else is looked at."""
    engine = left.engine()
    assert (engine.initialize(None, None, role, 0), engine.text) == (-1, "")


def test_no_role_at_all_ends_the_process(other: Process) -> None:
    engine = other.engine()
    with pytest.raises(ValueError, match="Expecting value"):
        engine.initialize(URL, ANY, None, 0)
    assert other.process.wait(10) == -signal.SIGSEGV


def test_there_is_no_port_before_a_start(left: Process) -> None:
    engine = left.engine()
    assert engine.get_rpc_port() == 0
    assert engine.initialize(URL, "127.0.0.1", "Prefill", 0) == 0
    assert 9000 <= engine.get_rpc_port() <= 65535


def test_ports_come_from_a_range_that_can_be_set(tmp_path: Path) -> None:
    range_ = {"MF_CONFIG_STORE_PORT_START": "28111", "MF_CONFIG_STORE_PORT_END": "28119"}
    process = Process(tmp_path / "npu", **SETTINGS, **range_)
    try:
        assert 28111 <= process.engine("Decode").get_rpc_port() <= 28119
    finally:
        process.end()


def test_addresses_are_literal(left: Process) -> None:
    """A Decode refuses a name at once, a Prefill when it is to connect."""
    engine = left.engine()
    assert engine.initialize(URL, "localhost:0", "Decode", 0) == -1
    assert engine.text.startswith("CreateParser failed")
    assert engine.initialize(URL, "[::1]:0", "Decode", 0) == 0


def test_a_prefill_under_a_name_fails_when_it_connects(left: Process, right: Process) -> None:
    prefill, decode = left.engine(), right.engine("Decode")
    assert decode.register_memory(right.address, PAGE) == 0
    assert prefill.initialize(URL, "localhost:0", "Prefill", 0) == 0
    assert prefill.transfer_sync_write(decode.session, left.address, right.address, 1) == -1


def test_low_ports_and_busy_ones(left: Process, right: Process) -> None:
    taken = right.engine("Decode").session
    engine = left.engine()
    assert engine.initialize(URL, "127.0.0.1:80", "Decode", 0) == INVALID
    assert engine.initialize(URL, taken, "Decode", 0) == -1


def test_an_address_of_another_host_takes_its_time(left: Process) -> None:
    code, _, seconds = left.engine().ticks("initialize", URL, "192.0.2.1:0", "Decode", 0)
    assert code == -1
    assert seconds > 0.1


@pytest.mark.parametrize("url", ["tcp://nothere:1", "bogus", ""])
def test_of_the_stores_url_only_the_scheme_counts(left: Process, right: Process, url: str) -> None:
    """So the two sides need not share one, and neither is there a store behind it."""
    decode = right.engine()
    assert decode.initialize(url, ANY, "Decode", 0) == 0
    assert decode.register_memory(right.address, PAGE) == 0
    assert left.engine("Prefill").transfer_sync_write(decode.session, left.address, right.address, 1) == 0


def test_another_scheme_is_refused_by_the_side_with_the_store(left: Process) -> None:
    engine = left.engine()
    assert engine.initialize("http://x", ANY, "Decode", 0) == -1
    assert engine.initialize("http://x", ANY, "Prefill", 0) == 0


def test_kinds_of_transfer(left: Process) -> None:
    """Members may be made of any number; a combined one does not start. HOST_RDMA needs a NIC."""
    engine = left.engine()
    for kind in (3, 16, 999):
        assert engine.initialize(URL, ANY, "Prefill", 0, {"kind": kind}) == -1
    for kind in (SDMA, HOST_TCP, 8, 64, 128):
        assert engine.initialize(URL, ANY, "Prefill", 0, {"kind": kind}) == 0
    assert engine.initialize(URL, ANY, "Prefill", 0, {"kind": HOST_RDMA}) == -1
    assert engine.initialize(URL, ANY, "Prefill", 0, {"kind": HOST_RDMA}, nic="mlx5_0") == -1
    assert engine.initialize(URL, ANY, "Prefill", 0, {"kind": HOST_RDMA}, nic="tcp://127.0.0.1:10002") == 0
    assert engine.initialize(URL, ANY, "Prefill", 8) == -1  # there are as many NPUs


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


def test_decode_reaches_prefill_only_once_that_has_connected_and_registered(left: Process, right: Process) -> None:
    prefill, decode = left.engine("Prefill"), right.engine("Decode")
    assert decode.register_memory(right.address, PAGE) == 0
    read = (prefill.session, right.address, left.address, 3)
    assert decode.transfer_sync_read(*read) == INVALID
    assert prefill.transfer_sync_write(decode.session, left.address, right.address, 1) == 0
    time.sleep(0.25)
    assert decode.transfer_sync_read(*read) == INVALID
    assert prefill.register_memory(left.address, PAGE) == 0
    left.memory[:3] = 5
    assert soon(decode.transfer_sync_read, *read) == 0
    assert right.memory[:4].tolist() == [5, 5, 5, 0]
    right.memory[:3] = 6
    assert decode.transfer_sync_write(*read) == 0
    assert left.memory[:4].tolist() == [6, 6, 6, 0]


@pytest.mark.parametrize("role", ["Prefill", "Decode"])
def test_engines_of_one_role_cannot_reach_each_other(left: Process, right: Process, role: str) -> None:
    one, two = left.engine(role), right.engine(role)
    assert two.register_memory(right.address, PAGE) == 0
    expected = -1 if role == "Prefill" else INVALID  # no store, or no such session in one's own
    assert one.transfer_sync_write(two.session, left.address, right.address, 1) == expected


def test_engines_of_one_process_cannot_reach_each_other(left: Process) -> None:
    prefill, decode = left.engine("Prefill"), left.engine("Decode")
    assert prefill.register_memory(left.address, PAGE) == decode.register_memory(left.address, PAGE) == 0
    assert prefill.transfer_sync_write(decode.session, left.address, left.address + 1, 1) == INVALID
    assert prefill.text == ""


def test_the_order_of_checks(left: Process, right: Process) -> None:
    """Lengths of lists, empty, flags, null or zero, peer and range; each call also has what later checks refuse."""
    prefill, decode = connected(left, right)
    write, session = prefill.batch_transfer_sync_write, decode.session
    here, there, beyond = left.address, right.address, right.address + PAGE
    assert (write(session, [], [0], [0], 1), prefill.text) == (-1, "")
    assert (write(session, [], [], [], 1), prefill.text) == (INVALID, "")
    assert (write(session, [0], [0], [0], 1), prefill.text) == (INVALID, "invalid flags")
    assert (write(session, [0], [beyond], [1]), prefill.text) == (INVALID, "invalid address, which is null")
    assert (write(session, [here], [0], [1]), prefill.text) == (INVALID, "invalid address, which is null")
    assert (write(session, [here], [beyond], [0]), prefill.text) == (INVALID, "invalid dataSizes, which is 0")
    assert (write(session, [here], [beyond], [1]), prefill.text) == (INVALID, "")
    assert write(session, [here], [there], [1], 2) == 0


def test_connecting_comes_before_every_check_of_the_lists(left: Process, right: Process) -> None:
    """Also with empty lists: that connects, and moves nothing."""
    prefill, decode = left.engine("Prefill"), right.engine("Decode")
    assert decode.register_memory(right.address, PAGE) == prefill.register_memory(left.address, PAGE) == 0
    assert prefill.batch_transfer_sync_write(UNBOUND, [], [], []) == -1
    assert prefill.batch_transfer_sync_write(decode.session, [], [], []) == INVALID
    assert soon(decode.transfer_sync_read, prefill.session, right.address, left.address, 1) == 0


@pytest.mark.parametrize("dest", ["localhost:9000", "garbage", "127.0.0.1", ""])
def test_destinations_are_literal(left: Process, right: Process, dest: str) -> None:
    for engine in (left.engine("Prefill"), right.engine("Decode")):
        assert engine.transfer_sync_write(dest, left.address, right.address, 1) == -1


def test_a_low_port_as_destination(left: Process) -> None:
    assert left.engine("Prefill").transfer_sync_write("127.0.0.1:1", left.address, left.address, 1) == -1
    assert left.engine("Decode").transfer_sync_write("127.0.0.1:1", left.address, left.address, 1) == INVALID


def test_everything_is_checked_before_anything_moves(left: Process, right: Process) -> None:
    prefill, decode = connected(left, right)
    left.memory[:8] = 1
    far = [right.address, right.address + PAGE]
    assert prefill.batch_transfer_sync_write(decode.session, [left.address] * 2, far, [8, 8]) == INVALID
    assert not right.memory.any()


def test_a_device_that_fails_has_moved_a_part(left: Process, tmp_path: Path) -> None:
    process = Process(tmp_path / "npu", **SETTINGS, MEMFABRIC_SIM_FAIL_AFTER="2")
    try:
        prefill, decode = process.engine("Prefill"), left.engine("Decode")
        process.memory[:9] = 3
        assert decode.register_memory(left.address, PAGE) == 0
        far = [left.address + 4 * i for i in range(3)]
        assert prefill.batch_transfer_sync_write(decode.session, [process.address] * 3, far, [4, 4, 4]) == -1
        assert left.memory[:12].tolist() == [3] * 8 + [0] * 4
    finally:
        process.end()


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


def test_registration_on_decode_says_what_is_wrong(left: Process) -> None:
    decode = left.engine("Decode")
    assert decode.register_memory(0, 10) == decode.register_memory(left.address, 0) == INVALID
    assert decode.batch_register_memory([], []) == INVALID
    assert decode.batch_register_memory([left.address], []) == -1
    assert decode.register_memory(left.address, PAGE) == decode.register_memory(left.address + 5, PAGE) == 0
    many = 1048577
    assert decode.batch_register_memory({"repeat": [left.address, many]}, {"repeat": [1, many]}) == INVALID


def test_registration_on_prefill_says_nothing(left: Process, right: Process) -> None:
    """It fails when the first peer is connected."""
    prefill, decode = left.engine("Prefill"), right.engine("Decode")
    assert decode.register_memory(right.address, PAGE) == 0
    assert prefill.register_memory(0, 0) == prefill.batch_register_memory([], []) == 0
    assert prefill.batch_register_memory([left.address], []) == -1
    assert prefill.transfer_sync_write(decode.session, left.address, right.address, 1) == -1
    assert prefill.text == "register local failed, result: -1"


def test_host_memory(left: Process, tmp_path: Path) -> None:
    """SDMA moves an NPU's memory alone. Whether memory is one's, the driver says; here, its file's name."""
    process = Process(tmp_path / "host", **SETTINGS)
    try:
        decode = process.engine("Decode")
        assert decode.register_memory(process.address, PAGE) == -1
        assert decode.text == "register local failed, result: -1"
        decode = process.engine("Decode", HOST_RDMA)
        assert decode.register_memory(process.address, PAGE) == 0
        prefill = left.engine("Prefill", HOST_RDMA)
        left.memory[:3] = 8
        assert prefill.transfer_sync_write(decode.session, left.address, process.address, 3) == 0
        assert process.memory[:4].tolist() == [8, 8, 8, 0]
    finally:
        process.end()


def test_overlapping_registrations_conflict_on_host_tcp(left: Process, right: Process) -> None:
    decode = right.engine("Decode", HOST_TCP)
    assert decode.register_memory(right.address, 10) == 0
    assert decode.register_memory(right.address + 10, 10) == -1
    prefill = left.engine("Prefill", HOST_TCP)
    assert prefill.register_memory(left.address, 10) == prefill.register_memory(left.address + 10, 10) == 0


def test_late_registration_is_visible_after_a_while(left: Process, right: Process, other: Process) -> None:
    """To peers that are connected; one that comes later sees it at once."""
    prefill, decode = connected(left, right)
    late = right.address + 3 * PAGE
    assert decode.register_memory(late, PAGE) == 0
    assert prefill.transfer_sync_write(decode.session, left.address, late, 1) == INVALID
    assert other.engine("Prefill").transfer_sync_write(decode.session, other.address, late, 1) == 0
    assert soon(prefill.transfer_sync_write, decode.session, left.address, late, 1) == 0


def test_unregistering_is_no_fence(left: Process, right: Process) -> None:
    """Not by either side, and it says 0 of what it never knew; but not of null."""
    prefill, decode = connected(left, right)
    assert decode.unregister_memory(right.address) == prefill.unregister_memory(left.address) == 0
    time.sleep(0.25)
    left.memory[:2] = 2
    assert prefill.transfer_sync_write(decode.session, left.address, right.address, 2) == 0
    assert right.memory[:3].tolist() == [2, 2, 0]
    assert decode.unregister_memory(12345) == 0
    assert (decode.unregister_memory(0), decode.text) == (INVALID, "invalid address, which is null")


def test_first_contact_with_nobody_blocks(left: Process) -> None:
    """For two minutes, really; other threads run meanwhile."""
    code, ticks, seconds = left.engine("Prefill").ticks(
        "transfer_sync_write", "127.0.0.1:65530", left.address, left.address, 1
    )
    assert code == -1
    assert seconds >= CONTACT
    assert ticks > 5


def test_first_contact_with_a_stopped_process_blocks_too(left: Process, other: Process) -> None:
    prefill, decode = left.engine("Prefill"), other.engine("Decode")
    assert decode.register_memory(other.address, PAGE) == 0
    session = decode.session
    other.stop()
    code, _, seconds = prefill.ticks("transfer_sync_write", session, left.address, other.address, 1)
    assert code == -1
    assert seconds >= CONTACT
    assert prefill.text.startswith("create trans entry failed")


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


@pytest.mark.parametrize("level", ["3", "4"])
def test_traces_are_written_whatever_the_level(tmp_path: Path, level: str) -> None:
    """Standard output has them, unless a function takes the log."""
    process = Process(tmp_path / "npu", **SETTINGS, MF_LOG_LEVEL=level)
    try:
        process.engine("Decode")
        (line,) = process.log.read_text().splitlines()
        assert " TRACE [" in line
        assert "][SMEM " in line
    finally:
        process.end()


def test_a_peer_that_dies_fails_a_live_connection_at_once(left: Process, other: Process) -> None:
    """With -1 and no text, and for ever; others are not harmed."""
    prefill, decode = connected(left, other)
    session = decode.session
    other.end()
    for _ in range(2):
        code, _, seconds = prefill.ticks("transfer_sync_write", session, left.address, other.address, 1)
        assert (code, prefill.text) == (-1, "")
        assert seconds < CONTACT


def test_a_peer_that_was_closed_fails_as_one_that_died(left: Process, right: Process) -> None:
    prefill, decode = connected(left, right)
    session = decode.session
    decode.destroy()
    assert prefill.transfer_sync_write(session, left.address, right.address, 1) == -1


def test_an_unregistered_local_source_is_not_refused(left: Process, right: Process) -> None:
    prefill, decode = connected(left, right)
    left.memory[4 * PAGE] = 7
    assert prefill.transfer_sync_write(decode.session, left.address + 4 * PAGE, right.address, 1) == 0
    assert right.memory[0] == 7


def test_asynchronous_transfers_need_a_stream(left: Process, right: Process) -> None:
    """And SDMA. Streams of the simulated machine are done at once."""
    prefill, decode = connected(left, right)
    left.memory[:2] = 6
    one = (decode.session, left.address, right.address, 2)
    many = (decode.session, [left.address], [right.address + 2], [2])
    assert prefill.transfer_async_write_submit(*one, 0) == INVALID
    assert prefill.transfer_async_write_submit(*one, 77) == 0
    assert prefill.batch_transfer_async_write_submit(*many, stream=77) == 0
    assert prefill.transfer_async_read_submit(*one, 77) == prefill.batch_transfer_async_read_submit(*many, 77) == 0
    assert right.memory[:5].tolist() == [6, 6, 6, 6, 0]
    prefill, decode = connected(left, right, kind=HOST_TCP)
    assert prefill.transfer_async_write_submit(decode.session, left.address, right.address, 2, 77) == -1


def test_quantising_is_for_another_npu(left: Process, right: Process) -> None:
    prefill, decode = connected(left, right)
    lists = (decode.session, [left.address], [right.address], [2])
    assert (prefill.batch_transfer_write_with_quant(*lists, [1, 2], [], 64), prefill.text) == (-1, "")
    assert prefill.batch_transfer_write_with_quant(*lists, [], [], 64) == -1
    assert prefill.text == "not support quant copy"


def test_shutdown(left: Process, right: Process) -> None:
    """Returns nothing, any number of times, also before a start; registering goes on to succeed."""
    prefill, decode = connected(left, right)
    session = decode.session
    for engine in (prefill, left.engine()):
        for _ in range(2):
            assert engine.destroy() is engine.unInitialize() is None
        assert (engine.transfer_sync_write(session, left.address, right.address, 1), engine.text) == (-1, NOT_STARTED)
        assert engine.register_memory(left.address, PAGE) == 0
    decode.destroy()
    assert decode.register_memory(0, 0) == 0


def test_texts_stay_until_they_are_taken(left: Process, right: Process) -> None:
    """Also after a call that returned 0; and each thread has its own."""
    prefill, decode = connected(left, right)
    assert prefill.transfer_sync_write(decode.session, left.address, right.address, 1, 5) == INVALID
    assert prefill.transfer_sync_write(decode.session, left.address, right.address, 1) == 0
    assert (prefill.text, prefill.text) == ("invalid flags", "")


def test_arguments_of_a_wrong_type(left: Process) -> None:
    engine = left.engine("Prefill")
    calls: list[Callable[[], str]] = [
        lambda: engine.initialize(URL, ANY, "Decode", 0, SDMA),
        lambda: engine.initialize(URL, ANY, "Decode", -1),
        lambda: engine.register_memory(-1, 1),
        lambda: engine.register_memory(1 << 64, 1),
        lambda: engine.register_memory(1.0, 1),
        lambda: engine.batch_register_memory(None, [1]),
        lambda: engine.batch_transfer_sync_write(ANY, [1.5], [1], [1]),
        lambda: engine.transfer_sync_write(ANY, 1, 1, 1, flags=-1),
        lambda: engine.transfer_sync_write(ANY, 1, 1),
        lambda: engine.transfer_sync_write(ANY, 1, 1, 1, colour="red"),
    ]
    for call in calls:
        assert re.match(r"TypeError: \w+\(\): incompatible function arguments", call())


def test_no_text_where_one_is_needed(left: Process) -> None:
    engine = left.engine()
    error = "RuntimeError: basic_string::_S_construct null not valid"
    assert engine.initialize(None, ANY, "Decode", 0) == error
    assert engine.initialize(URL, None, "Decode", 0) == error
    assert engine.transfer_sync_write(None, 1, 1, 1) == error


def test_a_start_that_failed_goes_on_to_take_registrations(tmp_path: Path) -> None:
    """There is no exception and no text. The first transfer fails."""
    process = Process(tmp_path / "npu", **SETTINGS, MEMFABRIC_SIM_NPU="absent")
    try:
        for role in ("Prefill", "Decode"):
            engine = process.engine()
            for kind in (SDMA, HOST_RDMA):
                assert engine.initialize(URL, ANY, role, 0, {"kind": kind}, nic="tcp://127.0.0.1:1") == -1
            assert (engine.text, engine.get_rpc_port()) == ("", 0)
            assert engine.register_memory(0, 0) == engine.batch_register_memory([1], [1]) == 0
            assert (engine.transfer_sync_write(ANY, 1, 1, 1), engine.text) == (-1, NOT_STARTED)
    finally:
        process.end()


def test_a_version_can_lack_things(tmp_path: Path) -> None:
    process = Process(tmp_path / "npu", **SETTINGS, MEMFABRIC_SIM_LACKS="batch_register_memory")
    try:
        assert process.engine().batch_register_memory([], []).startswith("AttributeError")
    finally:
        process.end()


def test_nobody_finds_the_simulator_by_accident() -> None:
    code = "import importlib.util as u; print((u.find_spec('memfabric_hybrid') or u.find_spec('os')).origin)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert str(SIMULATOR) not in done.stdout
