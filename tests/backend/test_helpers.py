"""What plugins share: ends of a batch, transfers that nobody can cancel, what peers are told, looks at a machine."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.helpers.system import System

from statelink.backend import Batch, Blocks, Ends, Region, RegionTable, Verdict
from statelink.backend.native import (
    Ledger,
    Located,
    Posted,
    Remote,
    check_pinnable,
    elsewhere,
    environment,
    lacking,
    loads,
    needs,
    on_machine,
    rdma_devices,
    session,
    settings,
    torch_place,
    unreachable,
    unregistered,
)
from statelink.errors import TransferError
from statelink.testing import bare_machine

HERE = RegionTable((Region(4096, 100), Region(8192, 100)), "any")
THERE = RegionTable((Region(1 << 40, 100),), "any")


def column(*values: int, kind: type = np.uint64) -> Any:
    return np.array(values, kind)


def batch(here: int = 8200, there: int = 1 << 40, nbytes: int = 10, **columns: Any) -> Batch:
    """One block, from the second region here to the first there."""
    made = {
        "source": column(here),
        "target": column(there),
        "nbytes": column(nbytes),
        "source_region": column(1, kind=np.uint32),
        "target_region": column(0, kind=np.uint32),
    }
    return Batch(Blocks(**made | columns), 1, 1)


# Memory that cannot be pinned


def test_memory_that_can_be_pinned() -> None:
    """Host memory that may be read and written; of memory of devices nothing is said."""
    with mmap.mmap(-1, 8192) as space:
        array = np.frombuffer(space, np.uint8)
        regions = [
            Region(array.ctypes.data, 4096),
            Region(1 << 46, 64, "cuda:0"),
            Region(array.ctypes.data + 4096, 4096),
        ]
        check_pinnable(regions, backend="any")
        check_pinnable([], backend="any")
        with System() as system:
            system.texts["/proc/self/maps"] = None
            check_pinnable([Region(4096, 100)], backend="any")  # nobody can tell
        del array


def test_memory_that_cannot_be_pinned(tmp_path: Path) -> None:
    """The error names the region, the byte, and what is there."""
    path = tmp_path / "pool"
    path.write_bytes(bytes(8192))
    good = np.zeros(8192, np.uint8)
    only_read, on_disk = (np.memmap(path, np.uint8, mode) for mode in ("r", "r+"))
    cases = [
        (4096, 100, "byte 0 of it is not mapped for reading and writing: nothing is mapped there"),
        (only_read.ctypes.data, 100, f"byte 0 of it is not mapped for reading and writing: r--s {path}"),
        (on_disk.ctypes.data, 8192, f"some of it is mapped from a file on a disk: rw-s {path}"),
    ]
    for address, nbytes, cause in cases:
        regions = [Region(good.ctypes.data, 8192), Region(address, nbytes)]
        system, text = System(), rf"region 1 could not be registered .*library lib 1\): .*{cause}"
        system.texts["/proc/self/mounts"] = f"none {tmp_path} ext4 rw 0 0\n"
        with system, pytest.raises(TransferError, match=text):
            check_pinnable(regions, backend="any", library="lib 1")


@pytest.mark.parametrize(
    ("most", "before", "refused"), [(-1, 1 << 40, False), (8192, 0, False), (8191, 0, True), (8192, 1, True)]
)
def test_more_memory_than_may_be_locked(monkeypatch: pytest.MonkeyPatch, most: int, before: int, refused: bool) -> None:
    """What devices hold already counts, too."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (most, most))
    array = np.zeros(8192, np.uint8)
    halves = [Region(array.ctypes.data + at, 4096) for at in (0, 4096)]
    text = rf"it is 8 KiB, {before} KiB are pinned, and this process may lock [78] KiB"
    expected = pytest.raises(TransferError, match=text) if refused else contextlib.nullcontext()
    with System() as system, expected:
        system.texts["/proc/self/status"] = f"VmPin:\t{before} kB\nCapEff:\t0000000000000000\n"
        check_pinnable(halves, backend="any")


# Ends


def test_ends_of_a_batch() -> None:
    ends = Ends.of(batch(), HERE, THERE)
    assert [each.tolist() for each in ends] == [[8200], [1], [1 << 40], [0], [10]]


@pytest.mark.parametrize(
    ("where", "whose"),
    [({"here": 8192 + 91}, "here"), ({"here": 4096}, "here"), ({"there": (1 << 40) + 91}, "by the peer")],
)
def test_ends_outside_their_regions_are_refused(where: dict[str, int], whose: str) -> None:
    with pytest.raises(TransferError, match=rf"outside the memory registered {whose} .*10 bytes at 0x"):
        Ends.of(batch(**where), HERE, THERE)


def test_blocks_that_were_checked_against_other_regions_are_checked() -> None:
    """The core may have checked them against the table that a peer had before."""
    beyond = batch(here=8192 + 91)
    others = RegionTable([Region(1 << 30, 4096)], "any")
    for checked in ((HERE.key, others.key), (others.key, THERE.key), (THERE.key, HERE.key)):
        with pytest.raises(TransferError, match="outside the memory registered here"):
            Ends.of(beyond._replace(checked=checked), HERE, THERE)
    same = RegionTable([Region(4096, 100), Region(8192, 100)], "another")
    Ends.of(beyond._replace(checked=(same.key, THERE.key)), HERE, THERE)  # it is not checked a second time


@pytest.mark.parametrize("columns", [{"source": column()}, {"target": column(1, 2)}])
def test_columns_that_contradict_each_other_are_refused(columns: dict[str, Any]) -> None:
    with pytest.raises(TransferError, match="a batch is empty, or its columns differ in length"):
        Ends.of(batch(**columns), HERE, THERE)
    with pytest.raises(TransferError, match=r"differ in length: columns of \[0\] blocks"):
        Ends.of(Batch(batch().blocks[:0], 1, 1), HERE, THERE)


# The ledger


class Library:
    """What a ledger is told by a library: handles that have ended, those that failed, and peers that it forgot."""

    def __init__(self) -> None:
        self.over: set[str] = set()
        self.bad: set[str] = set()
        self.seen: set[str] = set()
        self.forgotten: list[str] = []
        self.ledger: Ledger[Remote] = Ledger("any", self.ended, lambda remote: self.forgotten.append(remote.name))
        self.ledger.add(Remote("peer", THERE))

    def ended(self, work: Posted[Remote], handle: str) -> bool:
        assert handle not in self.seen, "the library freed it"
        if handle == "broken":
            raise RuntimeError("the library is broken")
        self.seen |= {handle} & (self.over | self.bad)
        if handle in self.bad and work.outcome is None:
            work.fail(f"{handle} failed", settled=False)
        return handle in self.over | self.bad

    def post(self, *handles: str) -> Posted[Remote]:
        work = Posted(self.ledger.usable("peer"))
        work.handles += handles
        self.ledger.posted.append(work)
        return work


def test_a_transfer_ends_with_its_last_handle() -> None:
    library = Library()
    work, other = library.post("a", "b"), library.post("c")
    library.over = {"a"}
    library.ledger.sweep()
    assert (work.outcome, work.handles, other.outcome) == (None, ["b"], None)
    library.over = {"b"}
    library.ledger.sweep()
    assert work.outcome == (True, "", True)
    assert library.ledger.posted == [other]


def test_a_transfer_that_failed_is_kept_until_its_last_handle_ended() -> None:
    library = Library()
    work = library.post("a", "b")
    library.bad = {"a"}
    library.ledger.sweep()
    assert (work.outcome, library.ledger.posted) == ((False, "a failed", False), [work])
    library.over = {"b"}
    library.ledger.sweep()
    assert (work.outcome, library.ledger.posted) == ((False, "a failed", False), [])


def test_what_ended_before_the_library_raised_is_not_looked_at_again() -> None:
    library = Library()
    first, second = library.post("a"), library.post("b", "broken", "c")
    library.over = {"a", "b", "c"}
    for _ in range(2):
        with pytest.raises(RuntimeError, match="is broken"):
            library.ledger.sweep()
    assert first.outcome == (True, "", True)
    assert (second.outcome, second.handles, library.ledger.posted) == (None, ["broken", "c"], [second])


def test_a_peer_is_forgotten_after_its_last_transfer() -> None:
    library = Library()
    first, last = library.post("a"), library.post("b")
    library.over = {"a"}
    library.ledger.leave("peer")
    assert first.outcome == (True, "", True)  # it had ended before
    assert [each.name for each in library.ledger.peers()] == ["peer"]
    with pytest.raises(TransferError, match=r"the peer is not connected .*peer peer"):
        library.ledger.usable("peer")
    with pytest.raises(TransferError, match="transfers of its earlier connection have not ended"):
        library.ledger.make_room("peer")
    assert library.forgotten == []
    library.over = {"b"}
    library.ledger.make_room("peer")
    reason = "the peer was disconnected while the transfer was in progress"
    assert (last.outcome, library.forgotten) == ((False, reason, True), ["peer"])
    library.ledger.leave("peer")
    library.ledger.leave("nobody")
    assert library.forgotten == ["peer"]
    assert library.ledger.peers() == []


def test_a_peer_that_is_lost_is_refused_and_can_be_connected_again() -> None:
    library = Library()
    library.ledger.usable("peer").lost = "it died"
    with pytest.raises(TransferError, match=r"the peer is lost .*it died"):
        library.ledger.usable("peer")
    library.ledger.make_room("peer")
    library.ledger.add(Remote("peer", THERE))
    assert library.forgotten == ["peer"]
    assert not library.ledger.usable("peer").lost


def test_closing_fails_what_goes_on_and_hands_its_handles_back() -> None:
    library = Library()
    done, failed, going = library.post("a"), library.post("b", "c"), library.post("d")
    library.over, library.bad = {"a"}, {"b"}
    handles, peers = library.ledger.close()
    assert (handles, [peer.name for peer in peers]) == (["c", "d"], ["peer"])
    reason = "the backend was closed while the transfer was in progress"
    outcomes = [work.outcome for work in (done, failed, going)]
    assert outcomes == [(True, "", True), (False, "b failed", False), (False, reason, False)]
    assert library.ledger.close() == ([], [])


# Descriptors


class Told(Located, frozen=True, array_like=True):
    """A plugin's, with one field of its own."""

    FORMAT = 3
    BACKEND = "any"
    LIBRARY = "anything"

    colour: str


GOOD = Told(3, "there", "::1", 5, "red")


def test_a_descriptor_arrives() -> None:
    found = Told.decode(GOOD.encode(), "there")
    assert found == GOOD
    assert found.session == session("::1", 5) == "[::1]:5"
    assert session("10.0.0.1", 5) == "10.0.0.1:5"


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (b"", "does not decode"),
        (b"\xff" * 9, "does not decode"),
        pytest.param(b"\x95\x03\xa5there\xa3::1\x05" + b"\x91" * 100_000, "does not decode", id="deep"),
        (GOOD.encode()[:-1], "does not decode"),
        (msgspec.msgpack.encode({"format": 3}), "does not decode"),
        (msgspec.msgpack.encode([3, "there", "::1", 5]), "does not decode"),
        (msgspec.msgpack.encode([4, ["of", "another"], "shape"]), "has format 4, this plugin speaks 3"),
        (msgspec.structs.replace(GOOD, link="elsewhere").encode(), "is that of a link called 'elsewhere'"),
        (msgspec.structs.replace(GOOD, host="there").encode(), "has a host that is no address: 'there'"),
        (msgspec.structs.replace(GOOD, port=0).encode(), "has the port 0"),
        (msgspec.structs.replace(GOOD, port=1 << 16).encode(), "has the port 65536"),
    ],
)
def test_a_descriptor_is_refused(raw: bytes, cause: str) -> None:
    said = rf"cannot be connected over anything .*backend any, peer there.*its descriptor {cause}"
    with pytest.raises(TransferError, match=said):
        Told.decode(raw, "there")


# Machines


@pytest.mark.parametrize(
    ("code", "status", "how"),
    [
        ("import sys; print(sys.argv[1]); print('no', file=sys.stderr)", 0, "exit status 0"),
        ("import sys; print(sys.argv[1]); sys.exit('no')", 1, "exit status 1"),
        ("import os, sys; print(sys.argv[1], flush=True); os.write(2, b'no'); os.abort()", -6, "SIGABRT"),
        (
            "import os, sys; print(sys.argv[1], flush=True); os.write(2, b'no'); os.kill(os.getpid(), 40)",
            -40,
            "signal 40",
        ),
    ],
)
def test_what_happens_elsewhere_ends_elsewhere(code: str, status: int, how: str) -> None:
    found = elsewhere(code, "yes")
    assert (found.status, found.how, found.output, found.errors.strip()) == (status, how, "yes\n", "no")
    assert (found.last, found._replace(errors=" \n").last) == ("no", "yes")


def test_what_hangs_elsewhere_is_ended() -> None:
    found = elsewhere("import time; time.sleep(100)", patience=0.3)
    assert found.last == "it said nothing"
    assert found == (None, "it did not end within 0.3 s", "", "")


def test_packages_are_found_elsewhere_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_package.py").write_text("print('here')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert elsewhere("import a_package").output == "here\n"


def test_libraries_are_really_looked_for() -> None:
    assert loads("libc.so.6")
    assert not loads("libno_such_thing.so")


def test_what_a_version_lacks() -> None:
    library = SimpleNamespace(Engine=SimpleNamespace(start=1), Kind=SimpleNamespace(FAST=1))
    assert lacking(library, {"Engine": "start stop", "Kind": "FAST", "Gone": "all"}) == ["Engine.stop", "Gone.all"]


def test_what_is_diagnosed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(check.verdict, check.found) for check in needs(["a card", "a driver"], "all of it")]
    assert found == [(Verdict.PROBLEM, "a card"), (Verdict.PROBLEM, "a driver")]
    assert [(check.verdict, check.found) for check in needs([], "all of it")] == [(Verdict.OK, "all of it")]
    assert settings("NONE_OF_", "OURS_").found == "no NONE_OF_* or OURS_* is set"
    monkeypatch.setenv("OURS_B", "2")
    monkeypatch.setenv("OURS_A", "1")
    assert settings("NONE_OF_", "OURS_").found == "OURS_A=1, OURS_B=2"


def test_what_is_refused_alike() -> None:
    region = Region(4096, 10, "cuda:3")
    for what, said in ((2, "region 2"), ("all of it", "all of it")):
        error = unregistered(what, region, OSError("no"), backend="any", library="any 1")
        wanted = f"{said} could not be registered (backend any, library any 1): 10 bytes of cuda:3 at 0x1000: no"
        assert str(error) == wanted
    error = unreachable("Any", "them", "no answer", backend="any", hint="wait")
    assert str(error) == "a peer cannot be connected over Any (backend any, peer them): no answer\nhint: wait"
    assert error.reason.code == "backend.transfer"
    for cause in ("register local failed, result: -1", "ibv_reg_mr of 4096 bytes failed"):
        assert unreachable("Any", "them", cause, backend="any").reason.code == "backend.memory"


@pytest.mark.parametrize(("kind", "place"), [("dram", ("dram", 0)), ("cuda", ("cuda", 0)), ("cuda:12", ("cuda", 12))])
def test_memory_as_torch_calls_it(kind: str, place: tuple[str, int]) -> None:
    assert torch_place(Region(4096, 10, kind), "Any", backend="any") == place


@pytest.mark.parametrize("kind", ["npu:0", "cuda:x", "hip:0"])
def test_memory_that_torch_does_not_know(kind: str) -> None:
    with pytest.raises(TransferError, match=rf"'{kind}' is unknown to Any .*the region at 0x1000"):
        torch_place(Region(4096, 10, kind), "Any", backend="any")


def test_a_machine_is_what_a_test_puts_there(tmp_path: Path) -> None:
    with bare_machine(tmp_path):
        assert not loads("libc.so.6")
        assert on_machine("/dev/card") == tmp_path / "dev" / "card"
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "libc.so.6").touch()
        assert loads("libc.so.6")
        assert loads("/usr/lib/libc.so.6")
    assert on_machine("/dev/card") == Path("/dev/card")


def test_rdma_devices_and_their_active_ports(tmp_path: Path) -> None:
    with bare_machine(tmp_path):
        assert rdma_devices() == {}
    states = {"mlx5_1/ports/1": "1: DOWN", "mlx5_0/ports/1": "4: ACTIVE", "mlx5_0/ports/2": "2: INIT"}
    for name, state in states.items():
        folder = tmp_path / "sys/class/infiniband" / name
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
    with bare_machine(tmp_path):
        assert rdma_devices() == {"mlx5_0": ["1"], "mlx5_1": []}


def test_the_environment_is_as_before_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE_OF_OURS", "before")
    monkeypatch.delenv("ANOTHER_OF_OURS", raising=False)
    with environment({"ONE_OF_OURS": "1", "ANOTHER_OF_OURS": "2"}):
        assert (os.environ["ONE_OF_OURS"], os.environ["ANOTHER_OF_OURS"]) == ("1", "2")
    with pytest.raises(ZeroDivisionError), environment({"ONE_OF_OURS": "1", "ANOTHER_OF_OURS": "2"}):
        _ = 1 / 0
    assert os.environ["ONE_OF_OURS"] == "before"
    assert "ANOTHER_OF_OURS" not in os.environ
