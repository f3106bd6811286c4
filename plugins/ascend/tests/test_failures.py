"""Peers that are not there yet or not any more, a library that refuses, and second links."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from plugins.ascend.tests.peer import FAILS_AFTER, MIB, NPUS, Peer

from statelink.backend import Region
from statelink.errors import BackendUnavailableError, TransferError

Make = Callable[..., Peer]


def connected(make: Make, **options: object) -> tuple[Peer, Peer]:
    prefill, decode = make("prefill"), make("decode")
    prefill.open("prefill", **options)
    decode.open("decode", **options)
    return prefill.connect(decode), decode.connect(prefill)


def test_peer_dies(make: Make) -> None:
    """Transfers to it fail at once; whether it still moves bytes nobody knows. Others are served."""
    prefill, mortal = connected(make)
    steady = make("steady").open("decode")
    prefill.connect(steady).serves(mortal)
    mortal.kill()
    reason = "MemFabric's batch_transfer_sync_write returned -1 (failed), for 1 blocks"
    assert prefill.move(mortal, prefill.block(mortal)) == [(False, reason, False)]
    for _ in range(2):  # the library might connect again, and wait for two minutes
        with pytest.raises(TransferError, match=r"a batch was not started .*: its process does not answer"):
            prefill.move(mortal, prefill.block(mortal))
    prefill.serves(steady)
    prefill.disconnect(mortal)
    with pytest.raises(TransferError, match="the peer is not connected"):
        prefill.move(mortal, prefill.block(mortal))
    prefill.close()


def test_a_peer_that_does_not_answer_keeps_nobody_waiting(make: Make) -> None:
    """Neither one that has ended, nor one that stands still: they are refused by name, and others connect meanwhile.

    The library would wait for either, two minutes each, before it connects to anybody else.
    """
    prefill, dead, still, steady = make("prefill"), make("dead"), make("still"), make("steady")
    prefill.open("prefill", connect_timeout=5.0)
    for peer in (dead, still, steady):
        peer.open("decode")
    dead.kill()
    still.stop()
    gone, silent, served = prefill.connect_at_once(dead, still, steady)
    assert re.search(r"TransferError: a peer cannot be connected .*peer dead.*: its process does not answer", gone[0])
    assert re.search(r"peer still.*: its process did not answer at .* within 5 s\nhint: see whether it", silent[0])
    assert served[0] == ""
    assert served[1] < 20  # of 120 s
    prefill.serves(steady)
    for peer in (dead, still):
        with pytest.raises(TransferError, match="the peer is not connected"):
            prefill.move(peer, prefill.block(peer))
    still.go_on()
    prefill.connect(still).serves(still)
    prefill.close()
    prefill.open("prefill").connect(steady).serves(steady)


def test_somebody_else_at_a_peers_address(make: Make) -> None:
    """A process that got the port of one that ended is not asked to connect; nor is one whose engine is gone."""
    prefill, decode, other = make("prefill"), make("decode"), make("other")
    prefill.open("prefill")
    for peer in (decode, other):
        peer.open("decode")
    theirs, ours = (msgspec.msgpack.decode(peer.descriptor) for peer in (other, decode))
    wrong = msgspec.msgpack.encode([*ours[:-1], theirs[-1]])  # its door
    with pytest.raises(TransferError, match=r"cannot be connected .*: somebody else answers at 127\.0\.0\.1 port \d+"):
        prefill.meet(decode.link, wrong, decode.regions)
    with socket.create_server(("127.0.0.1", 0)) as free:
        wrong = msgspec.msgpack.encode([*ours[:3], free.getsockname()[1], *ours[4:]])
    with pytest.raises(TransferError, match=r"its process answers, and its engine at port \d+ of 127\.0\.0\.1 does"):
        prefill.meet(decode.link, wrong, decode.regions)
    prefill.connect(decode).serves(decode)


def test_decode_waits_until_a_prefill_has_come(make: Make) -> None:
    """It cannot reach a prefill by itself; so a write that comes too early waits, and is refused in the end."""
    prefill, decode = make("prefill"), make("decode")
    prefill.open("prefill")
    decode.open("decode", connect_timeout=0.3).connect(prefill)
    back = decode.block(prefill)
    with pytest.raises(
        TransferError, match=r"refused before it started .*write returned -2000 \(invalid parameter\); it does not"
    ):
        decode.move(prefill, back)
    decode.arrays[0][:100] = 7
    for _ in range(2):
        decode.disconnect(prefill)
        decode.connect(prefill)
    prefill.connect(decode)
    assert decode.move(prefill, back) == [(True, "", True)]
    assert (prefill.arrays[0][:100] == 7).all()


def test_memory_that_a_peer_never_registered(make: Make) -> None:
    """Its region table says more than its library knows: the refusal is the library's, and nothing moved."""
    prefill, decode = make("prefill"), make("decode", (8 * MIB,))
    prefill.open("prefill", connect_timeout=3.0)
    decode.construct("decode")
    first = decode.regions[0]
    decode.register([Region(first.address, 100, "npu:0")])
    decode.describe()
    prefill.connect(decode)
    with pytest.raises(TransferError, match=r"a batch was refused .*-2000 \(invalid parameter\)"):
        prefill.move(decode, prefill.block(decode, offset=6 * MIB))
    assert not decode.memory.any()


@pytest.mark.usefixtures("standin")
def test_device_that_fails_in_a_batch(make: Make) -> None:
    """A part has moved, and the transfer says that it may go on."""
    prefill, decode = connected(make)
    prefill.setenv(FAILS_AFTER, "1")
    prefill.arrays[0][:] = 1
    one = prefill.block(decode)
    two = type(one).concatenate([one, prefill.block(decode, offset=5000)])
    reason = "MemFabric's batch_transfer_sync_write returned -1 (failed), for 2 blocks"
    assert prefill.move(decode, two) == [(False, reason, False)]
    assert np.asarray(decode.arrays[0][:101]).tolist() == [1] * 100 + [0]
    assert not decode.arrays[0][5000:].any()


@pytest.mark.usefixtures("standin")
def test_memory_of_another_device(make: Make) -> None:
    """It is refused; and a process keeps to the NPU of its first link."""
    peer = make("peer", kind="npu:3")
    with pytest.raises(TransferError, match=r"region 0 could not .*of npu:3 at 0x.*: the engine runs on device_id 0"):
        peer.open("decode")
    peer.close()
    with pytest.raises(BackendUnavailableError, match="this process was on device_id 0, and the library"):
        peer.open("decode", device_id=3)
    peer.kill()
    prefill, decode = make("prefill", kind="npu:3"), make("decode", kind="npu:3")
    prefill.open("prefill", device_id=3)
    decode.open("decode", device_id=3)
    prefill.connect(decode).serves(decode)
    for each in (prefill, decode):
        each.kill()


@pytest.mark.usefixtures("standin")
@pytest.mark.parametrize(("role", "when"), [("decode", "registered"), ("prefill", "reached")])
def test_memory_that_the_library_cannot_register(make: Make, role: str, when: str) -> None:
    """Host memory that the engine calls an NPU's: on decode it is refused as itself, on prefill when it connects."""
    peer, other = make("liar"), make("other").open("prefill" if role == "decode" else "decode")
    peer.construct(role)
    host = np.zeros(1, np.uint64).ctypes.data  # an address of this process is nobody's there
    regions = [*peer.regions, Region(host, 8, "npu:0")]
    if role == "decode":
        with pytest.raises(
            TransferError, match=r"region 1 could not be registered .*: 8 bytes .*-1 \(failed\): register local"
        ):
            peer.register(regions)
    else:
        peer.register(regions)
        peer.describe()
        with pytest.raises(TransferError, match=r"cannot be reached: .* returned -1 \(failed\): register local failed"):
            peer.connect(other)


def test_two_links_in_one_process(make: Make) -> None:
    """The second is refused, the first goes on, and one after the other is fine."""
    prefill, decode = connected(make)
    with pytest.raises(BackendUnavailableError, match=r".*starts once in a process.*\nhint: close that link"):
        prefill.construct("prefill")
    prefill.serves(decode)
    prefill.close()
    prefill.close()
    for call in (prefill.describe, lambda: prefill.register(prefill.regions)):
        with pytest.raises(TransferError, match="the backend is closed"):
            call()
    prefill.open("prefill").connect(decode).serves(decode)


@pytest.mark.parametrize("role", ["", "both"])
def test_unknown_role(make: Make, role: str) -> None:
    with pytest.raises(BackendUnavailableError, match=f"MemFabric needs a role, and was given '{role}'"):
        make("peer").open(role)


@pytest.mark.usefixtures("standin")
def test_start_that_fails(make: Make) -> None:
    """There is no engine then, although the library would register memory; the process can try again."""
    peer = make("peer")
    peer.setenv(NPUS, "0")
    for _ in range(2):
        with pytest.raises(
            BackendUnavailableError,
            match=r"engine could not be started .*initialize returned -1 \(failed\).*; there is no NPU",
        ):
            peer.open("decode")
