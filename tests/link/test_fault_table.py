"""Faults of an engine, a peer or a library, on every backend: the right outcome, and a process that stays healthy.

The `pair` fixture runs a whole request over the same links after each test, and looks at every byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import zmq
from tests.helpers import peers
from tests.helpers.pools import Index, Kv, Mamba, hybrid

from statelink import Status
from statelink.errors import UnsupportedError
from statelink.state import Coverage, IndexSpace, StateType

if TYPE_CHECKING:
    from tests.helpers.pair import Pair
    from tests.link.conftest import TwoEngines

pytestmark = pytest.mark.soak_over("mooncake", why="the outcomes are the link's, and none differs by the library")
ACME = StateType(name="acme.index", index=IndexSpace.PAGE, coverage=Coverage.SUFFIX, aligned=True)


def test_unknown_state_type_is_moved_once_both_sides_know_it(two_engines: TwoEngines) -> None:
    for engine in (two_engines.prefill, two_engines.decode):
        engine.run("statelink.state", "register_state_type", ACME)
    pools = hybrid(mystery=Index(name="mystery", type=ACME.name), swa=None, dsa=None)
    made = two_engines.pair(pools, pools)
    made.run()
    made.run(200, 64)


@pytest.mark.parametrize("knows", ["prefill", "decode"])
def test_unknown_state_type_is_refused_by_name(pair: Pair, two_engines: TwoEngines, knows: str) -> None:
    """One side knows a type that the other does not: a refusal, and not a silence."""
    engine = two_engines.prefill if knows == "prefill" else two_engines.decode
    engine.run("statelink.state", "register_state_type", ACME)
    pools = hybrid(mystery=Index(name="mystery", type=ACME.name))
    if knows == "decode":
        link = two_engines.open("decode", pools)
        receiving = link.receive(71, pair.prefill.address, 64, deadline=20)
    else:
        link = two_engines.open("prefill", pools)
        receiving = pair.decode.receive(71, link.address, 64, deadline=20)
    text = receiving.failed()
    assert ACME.name in text
    assert "deadline" not in text


def test_mamba_strides_differ(two_engines: TwoEngines) -> None:
    """Slots lie further apart on decode: what is between them stays as it is."""
    made = two_engines.pair(hybrid(), hybrid(mamba=Mamba(pad=3)))
    made.run()
    made.run()
    turned = two_engines.pair(hybrid(mamba=Mamba(pad=2)), hybrid())
    turned.run()


def test_mamba_geometry_differs(pair: Pair, two_engines: TwoEngines) -> None:
    other = Mamba(groups=(32, 32, 96), inner=(8, 32))
    decode = two_engines.open("decode", hybrid(mamba=other))
    text = decode.receive(72, pair.prefill.address, 64, deadline=20).failed()
    assert text == (
        "prefill and decode do not describe the same state "
        f"(backend {two_engines.backend}, peer {pair.prefill.address}, prefill prefill, decode decode): "
        "mamba/layers.4.conv: extent of axis 'channel': 160 on decode, 128 on prefill; "
        "mamba/layers.5.conv: extent of axis 'channel': 160 on decode, 128 on prefill; "
        "mamba/layers.4.ssm: extent of axis 'state1': 32 on decode, 16 on prefill; "
        "mamba/layers.5.ssm: extent of axis 'state1': 32 on decode, 16 on prefill\n"
        "hint: both engines must be configured for the same model, cache dtype and layout"
    )


def test_window_keys_are_smaller_than_values(pair: Pair) -> None:
    """Legal, and every byte is where it belongs, on either side of a smaller page."""
    swa = next(pool for pool in pair.prefill.memory.pools if pool.name == "swa")
    assert isinstance(swa, Kv)
    assert swa.dim < swa.v_dim
    for tokens in (40, 72, 88, 200, 256):
        pair.run(tokens)


GARBAGE = [
    [b""],
    [b"hello"],
    [b"hello", b""],
    [b"hello", b"\xc1"],
    [b"request", b"\x80"],
    [b"request", b"\x91" * 5000],
    [b"\xff" * 300, b"\x00"],
    [b"hello", b"{}", b"surplus"],
    [b"failed", bytes(range(256))],
    [b"hello", b"\xdf\xff\xff\xff\xff"],
    [b"hello", b"\xdb\xff\xff\xff\xff"],
]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_garbage_to_a_control_port(pair: Pair, side: str) -> None:
    link = pair.prefill if side == "prefill" else pair.decode
    before = sum(link.snapshot()["dropped_frames"].values())
    case = pair.case()
    receiving, sending = pair.begin(case)  # a room is open meanwhile
    with peers.dialled(link.address) as socket:
        for frames in GARBAGE:
            socket.send_multipart(frames)
        peers.until(lambda: sum(link.snapshot()["dropped_frames"].values()) == before + len(GARBAGE))
        assert not socket.poll(0, zmq.POLLIN), "garbage is not answered"
    for raw in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + b"\x00" * 64, bytes(range(256)) * 64):
        peers.raw_bytes(link.address, raw)
    pair.push(sending, case)
    pair.ended(case, receiving, sending)


def test_send_and_every_push_before_the_request(pair: Pair) -> None:
    case = pair.case()
    sending = pair.send(case)
    pair.push(sending, case, 64, 128)
    assert sending.see().status is Status.BOOTSTRAPPING
    assert not sending.see().quiesced
    receiving = pair.receive(case)
    pair.ended(case, receiving, sending)


@pytest.mark.parametrize("fault", ["refuse", "fail", "defect"])
def test_transport_refuses_one_batch(two_engines: TwoEngines, fault: str) -> None:
    made = two_engines.pair(backend=f"faulty-{two_engines.backend}")
    made.run()
    case = made.case()
    two_engines.prefill.run("faulty_backends", "plan", "submit", fault)
    receiving, sending = made.begin(case)
    made.push(sending, case)
    texts = {receiving.failed(), sending.failed()}
    assert len(texts) == 1, "the first reason is the one that both sides report"
    (text,) = texts
    cause = {"refuse": "ENOBUFS", "fail": "the transport failed: EIO", "defect": "a defect of this backend"}[fault]
    assert cause in text
    assert f"room {case.room}" in text
    assert f"faulty-{two_engines.backend}" in text
    if fault == "defect":  # which says nothing of the bytes
        assert not sending.see().quiesced
        memory = made.prefill.memory
        named = case.whole(memory.pools)
        arrays = [(a, named[name]) for name, each in memory.arrays.items() for a in each.values() if len(a)]
        seen = made.prefill.snapshot()
        assert seen["quarantined"] == [case.room]
        assert seen["quarantined_bytes"] == {"a defect of this backend": sum(a[ids].nbytes for a, ids in arrays)}
        two_engines.untidy = True
        return
    for side in (sending, receiving):
        assert side.wait(quiesced=True).quiesced
    made.spoilt(case)
    made.run()  # the same links, the same peers
    made.idle()


def test_backend_that_does_not_declare_the_type(two_engines: TwoEngines) -> None:
    if two_engines.backend != "tcp":
        pytest.skip("its declaration is made over tcp")
    with pytest.raises(UnsupportedError) as error:
        two_engines.open("decode", backend="narrow")
    assert str(error.value) == (
        "backend 'narrow' does not move state type 'swa' (component swa, instance decode, rank 0): "
        "it declares aux, kv\n"
        "hint: use another backend, or install a package that brings a strategy for this type"
    )
    pools = hybrid(swa=None, dsa=None, mamba=None)
    two_engines.pair(pools, pools, backend="narrow").run()
