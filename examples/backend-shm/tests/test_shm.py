"""What the kit cannot know: other hosts, strangers on this one, and a peer that does not answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from statelink_shm import Options, ShmBackend

from statelink.backend import BackendContext, Batch, Blocks, Outcome, Region, Side
from statelink.errors import TransferError

SIZE = 100_000


@pytest.fixture(name="make")
def make_fixture() -> Iterator[Callable[..., ShmBackend]]:
    made: list[tuple[ShmBackend, npt.NDArray[np.uint8]]] = []

    def make(link: str, memory: npt.NDArray[np.uint8], **options: float) -> ShmBackend:
        backend = ShmBackend(BackendContext(options=msgspec.convert(options, Options), link=link))
        made.append((backend, memory))  # what is registered has to live until the backend is closed
        backend.register(regions(memory))
        return backend

    yield make
    for backend, _ in made:
        backend.close()


def regions(memory: npt.NDArray[np.uint8]) -> tuple[Region, ...]:
    return (Region(memory.ctypes.data, len(memory)),)


def whole(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> Batch:
    first, to = np.array([source.ctypes.data], np.uint64), np.array([target.ctypes.data], np.uint64)
    zero = np.zeros(1, np.uint32)
    return Batch(Blocks(first, to, np.array([len(source)], np.uint64), zero, zero), 7, 1)


def test_a_block_passes_through_a_payload_that_is_smaller(make: Callable[..., ShmBackend]) -> None:
    source, target = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8), np.zeros(SIZE, np.uint8)
    here, there = make("here", source), make("there", target, payload=4099)
    here.connect("there", there.descriptor(), regions(target))
    batch = whole(source, target)
    there.grant("here", 7, 1, batch.blocks.target, batch.blocks.nbytes)
    outcome = here.submit("there", batch).outcome
    assert outcome is not None
    assert outcome.ok, outcome.reason
    assert np.array_equal(source, target)


def test_a_grant_is_looked_at_again_before_every_piece(make: Callable[..., ShmBackend]) -> None:
    """A revoke in the middle of one block, which takes thousands of pieces, ends it there."""
    source, target = np.ones(64 << 20, np.uint8), np.zeros(64 << 20, np.uint8)
    here, there = make("here", source), make("there", target, payload=4096)
    here.connect("there", there.descriptor(), regions(target))
    batch = whole(source, target)
    there.grant("here", 7, 1, batch.blocks.target, batch.blocks.nbytes)
    outcomes: list[Outcome | None] = []
    writing = threading.Thread(target=lambda: outcomes.append(here.submit("there", batch).outcome))
    writing.start()
    until = time.monotonic() + 30
    while not target[0] and time.monotonic() < until:
        time.sleep(0.0001)
    assert there.revoke("here", 7, 1).outcome == Outcome(True)
    target[:] = 0
    writing.join(30)
    assert not target.any()
    assert outcomes == [Outcome(False, "the peer has not granted this memory, or has taken it back")]


def test_a_peer_on_another_host_is_refused(make: Callable[..., ShmBackend]) -> None:
    memory = np.zeros(SIZE, np.uint8)
    here, there = make("here", memory), make("there", memory)
    moved = {**msgspec.json.decode(there.descriptor()), "boot": "11111111-2222-3333-4444-555555555555"}
    with pytest.raises(TransferError, match="it is on another host") as caught:
        here.connect("there", msgspec.json.encode(moved), regions(memory))
    assert caught.value.hint == "shared memory ends at the host; backend 'tcp' does not"


def test_a_process_that_does_not_know_the_secret_is_not_let_in(make: Callable[..., ShmBackend]) -> None:
    memory = np.zeros(SIZE, np.uint8)
    here, there = make("here", memory), make("there", memory)
    found = {**msgspec.json.decode(there.descriptor()), "secret": "0" * 32}
    with pytest.raises(TransferError, match="it does not let us in"):
        here.connect("there", msgspec.json.encode(found), regions(memory))


@pytest.mark.parametrize("said", [b"", b"{}", b"\xff" * 4096, b'{"link": "x", "secret": 5}'])
def test_noise_on_its_socket_harms_nobody(make: Callable[..., ShmBackend], said: bytes) -> None:
    memory = np.zeros(SIZE, np.uint8)
    here, there = make("here", memory), make("there", memory)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.connect("\0" + msgspec.json.decode(there.descriptor())["socket"])
        channel.settimeout(20)
        channel.send(said)
        assert channel.recv(64) == b""
    here.connect("there", there.descriptor(), regions(memory))


def test_a_peer_that_does_not_answer_is_lost_and_only_the_source_is_settled(make: Callable[..., ShmBackend]) -> None:
    """Who holds this lock stands for a process that stands still in the middle of a piece."""
    source, target = np.ones(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    here, there = make("here", source, timeout=0.2), make("there", target)
    here.connect("there", there.descriptor(), regions(target))
    batch = whole(source, target)
    there.grant("here", 7, 1, batch.blocks.target, batch.blocks.nbytes)
    with there.inbound.grants.lock:
        outcome = here.submit("there", batch).outcome
    assert outcome is not None
    assert (outcome.ok, outcome.settled) == (False, Side.SOURCE)
    assert "timed out" in outcome.reason
    with pytest.raises(TransferError, match="the peer was lost"):
        here.submit("there", batch)
