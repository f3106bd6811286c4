"""``require``: bytes travel over what is required, or not at all; and reports say over what they did."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.fakes import FakeDecode, FakePrefill
from tests.helpers.links import Rank, hand_over
from tests.helpers.pools import Kv, Memory

import statelink
from statelink import Status, wire
from statelink.errors import RoomError, UnsupportedError
from statelink.tcp import TcpBackend

if TYPE_CHECKING:
    from pathlib import Path

    from tests.registry.sites import Site

pytestmark = pytest.mark.usefixtures("no_configuration")

TCP: dict[str, Any] = {"role": "prefill", "backend": "tcp"}
SOCKETS = {"options": {"same_host_copy": False}}


@pytest.mark.parametrize(
    ("require", "transport", "allowed"),
    [
        ((), "unknown", True),
        (("rdma",), "rdma", True),
        (("rdma",), "tcp", False),
        (("rdma",), "unknown", False),
        (("rdma",), "", False),
        (("rdma", "shm"), "shm", True),
        (("rdma", "cuda_ipc"), "rdma+cuda_ipc", True),
        (("rdma",), "rdma+tcp", False),
    ],
)
def test_what_is_allowed(
    require: tuple[str, ...], transport: str, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part of a transport is required, and known; the side that requires it refuses its peer otherwise."""
    monkeypatch.setattr(TcpBackend, "transports", lambda options: frozenset(require))
    monkeypatch.setattr(TcpBackend, "transport", lambda self, peer: transport)
    source, target = Rank("p", 1), Rank("d")
    with source.open(TCP, require=require) as prefill, target.open(TCP, role="decode") as decode:
        receiving = decode.receive(1, prefill.address, 160)
        while receiving.status is Status.BOOTSTRAPPING:
            decode.changes(0.1)
        assert (receiving.status is not Status.FAILED) is allowed
        assert receiving.reason is None or receiving.reason.code == "peer.transport"


def test_a_peer_that_still_connects_says_its_transport_later(tmp_path: Path) -> None:
    pools = (Kv(layers=(0,), pages=4),)
    config = {**TCP, "role": "decode", "require": "socket", "inspect": False}
    fake, memory = FakePrefill(tmp_path, pools), Memory(tmp_path / "here", pools)
    with statelink.open(config, memory.inventory("decode")) as decode:
        receiving = decode.receive(1, fake.address, 64)
        fake.attached(connecting=True)
        assert fake.plan is not None
        fake.say(wire.Attached(sender=fake.name, to=fake.peer, digest=fake.plan.digest, transport="socket"))
        while receiving.status is Status.BOOTSTRAPPING:
            decode.changes(0.1)
        assert receiving.status is Status.WAITING, receiving.reason
    fake.close()


def test_a_peer_that_connects_long_after_it_was_greeted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill cannot find out the transport before that, and does not refuse the peer because it has tried."""
    pools, there, tried = (Kv(layers=(0,), pages=4),), threading.Event(), threading.Event()
    found: dict[str, str] = {}

    def connect(backend: TcpBackend, peer: str, *given: Any) -> None:
        found[peer] = "process_vm" if there.is_set() else "unknown"
        tried.set()

    monkeypatch.setattr(TcpBackend, "connect", connect)
    monkeypatch.setattr(TcpBackend, "transport", lambda self, peer: found.get(peer, "unknown"))
    config, memory = {**TCP, "require": "process_vm", "inspect": False}, Memory(tmp_path / "here", pools)
    with statelink.open(config, memory.inventory("prefill")) as prefill:
        fake = FakeDecode(tmp_path, prefill.address, pools)
        fake.greet()
        tried.wait(0.3)
        there.set()
        fake.attach()
        fake.close()


@pytest.mark.parametrize(("options", "transport"), [({}, "process_vm"), (SOCKETS, "socket")])
def test_reports_and_snapshots_say_what_carried_the_bytes(options: dict[str, Any], transport: str) -> None:
    source, target = Rank("p", 1), Rank("d")
    with source.open({**TCP, **options}) as prefill, target.open({**TCP, "role": "decode"}) as decode:
        sent, received = hand_over(prefill, decode, source, target)
        assert sent.transports == {decode.name: transport}
        assert received.transports == {prefill.name: transport}
        for link in (prefill, decode):
            assert [rank["transport"] for rank in link.snapshot()["ranks"]] == [transport]


@pytest.mark.parametrize("require", ["process_vm", ["rdma", "process_vm"]])
def test_what_is_required_and_used_is_not_refused(require: Any) -> None:
    source, target = Rank("p", 1), Rank("d")
    with (
        source.open(TCP, require=require) as prefill,
        target.open(TCP, role="decode", require=require) as decode,
    ):
        sent, received = hand_over(prefill, decode, source, target)
        assert prefill.snapshot()["require"] == ([require] if isinstance(require, str) else require)
    assert {*sent.transports.values(), *received.transports.values()} == {"process_vm"}


def refused_at_connect(prefill: dict[str, Any], decode: dict[str, Any]) -> RoomError:
    source, target = Rank("p", 1), Rank("d")
    with source.open({**TCP, **prefill}) as sender, target.open({**TCP, "role": "decode", **decode}) as receiver:
        # Nothing is pushed: it is the peer that is refused, and not the first bytes.
        receiving = receiver.receive(1, sender.address, 160, {"kv": range(20, 30)})
        receiving.wait(20)
        with pytest.raises(RoomError) as refused:
            receiving.check()
        assert not target.arrays.any()
    return refused.value


def test_another_transport_is_refused_when_a_peer_connects() -> None:
    error = refused_at_connect({"require": "process_vm"}, SOCKETS)
    assert error.code == "peer.transport"
    assert "process_vm is required, and the transport is socket" in str(error)


def test_decode_alone_may_require_and_refuses_what_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # prefill may know it by then
        patch.setattr(TcpBackend, "transport", lambda self, peer: "unknown")
        error = refused_at_connect({}, {"require": "process_vm"})
    assert error.code == "peer.transport"
    assert "process_vm is required, and the transport is unknown" in str(error)
    assert "on prefill" in error.hint
    error = refused_at_connect(SOCKETS, {"require": "process_vm"})
    assert "the transport is socket" in str(error)


def test_a_backend_that_fails_to_tell_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: TcpBackend, peer: str) -> str:
        raise RuntimeError("boom")

    monkeypatch.setattr(TcpBackend, "transport", broken)
    error = refused_at_connect({"require": "process_vm"}, {})
    assert error.code == "peer.transport"
    assert "process_vm is required, and the backend's `transport` raised RuntimeError: boom" in str(error)
    assert error.hint == "tell the author of the package; `statelink conform tcp -k Connecting` tests it"
    monkeypatch.setattr(TcpBackend, "transport", lambda self, peer: 42)
    error = refused_at_connect({"require": "process_vm"}, {})
    assert "and the backend's `transport` returned 42, and not a str" in str(error)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["process_vm"], r"its `transports` returned \['process_vm'\], and not a frozenset of str"),
        ("process_vm", "its `transports` returned 'process_vm', and not"),
        (frozenset({1}), r"its `transports` returned frozenset\(\{1\}\), and not"),
        (RuntimeError("boom"), "its `transports` raised RuntimeError: boom"),
    ],
)
def test_a_wrong_answer_of_transports_names_backend_and_method(
    given: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def transports(options: Any) -> object:
        if isinstance(given, Exception):
            raise given
        return given

    monkeypatch.setattr(TcpBackend, "transports", transports)
    with pytest.raises(UnsupportedError, match=f"backend 'tcp' cannot tell .*{said}") as refused:
        Rank("p").open(TCP, require="process_vm")
    assert refused.value.code == "backend.defect"
    assert "statelink conform tcp -k Declaration" in refused.value.hint


def test_a_transport_that_will_not_be_used_is_refused_at_open() -> None:
    for changes in ({"require": "rdma"}, {"require": "process_vm", **SOCKETS}):
        with pytest.raises(UnsupportedError, match="does not use a required transport") as refused:
            Rank("p").open(TCP, **changes)
        assert refused.value.code == "backend.transport"


def test_a_backend_that_cannot_tell_is_refused_at_open(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATELINK_PLUGINS", "statelink-good")
    site.backend("good")
    with pytest.raises(UnsupportedError, match="cannot tell which transport") as refused:
        Rank("p").open(TCP, backend="good", require="rdma")
    assert refused.value.code == "backend.transport"


def test_a_transport_that_changes_fails_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection was what is required when the peers met, and is not when the bytes are to go."""
    source, target = Rank("p", 1), Rank("d")
    with (
        source.open(TCP, require="process_vm") as prefill,
        target.open(TCP, role="decode") as decode,
    ):
        receiving = decode.receive(1, prefill.address, 160, {"kv": range(20, 30)})
        sending = prefill.send(1, 160)
        while sending.status < 2:
            assert sending.status, sending.reason
            sending.wait(0.01)
        monkeypatch.setattr(TcpBackend, "transport", lambda self, peer: "socket")
        sending.push({"kv": range(10)})
        assert receiving.wait(20) == 0
        assert receiving.reason is not None
        assert receiving.reason.code == "peer.transport"
        assert not target.arrays.any()
