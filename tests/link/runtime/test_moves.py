"""What a link asks of its backend to move a request, and when: bounded, and told of every failure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.links import Rank

import statelink
from statelink import Status, state
from statelink.backend import Batch, Fence, Outcome, Transfer
from statelink.tcp import TcpBackend

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 256
"""Bytes of a page of one tensor of a `Rank`."""
MOST = 4
"""Transfers that the backend takes at once."""


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[statelink.Link, statelink.Link]]:
    """Links that give each page to the backend by itself, which takes a few at once."""
    monkeypatch.setattr(
        TcpBackend,
        "capabilities",
        # The other side's backend sees nothing of these batches.
        dataclasses.replace(TcpBackend.capabilities, max_transfers=MOST, ends_unpolled=False, target=Fence.MOVER),
    )
    config = {"role": "prefill", "backend": "tcp", "slice_bytes": PAGE}
    with Rank("p", 1).open(config) as prefill, Rank("d").open(config, role="decode") as decode:
        yield prefill, decode


def begin(prefill: statelink.Link, decode: statelink.Link) -> tuple[statelink.Receiving, statelink.Sending]:
    """A request of ten pages, none of which is beside another."""
    sending = prefill.send(1, 160, deadline=60)
    sending.push({"kv": range(0, 20, 2)})
    return decode.receive(1, prefill.address, 160, {"kv": range(0, 20, 2)}, deadline=60), sending


def test_polls_until_the_last_transfer_has_ended(
    pair: tuple[statelink.Link, statelink.Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that works only while it is polled, and ends one transfer each time: the first to end is not all."""
    made: list[Transfer] = []
    most = 0

    def submit(self: TcpBackend, peer: str, batch: Batch) -> Transfer:
        nonlocal most
        made.append(Transfer())
        most = max(most, sum(each.outcome is None for each in made))
        return made[-1]

    def poll(self: TcpBackend, transfers: Sequence[Transfer]) -> None:
        assert all(transfer.outcome is None for transfer in transfers)
        for transfer in transfers[:1]:
            transfer.succeed()

    monkeypatch.setattr(TcpBackend, "submit", submit)
    monkeypatch.setattr(TcpBackend, "poll", poll)
    receiving, sending = begin(*pair)
    assert sending.wait(20) is receiving.wait(20) is Status.SUCCEEDED
    assert (len(made), most) == (20, MOST - 1), "one transfer is kept free for small pushes"
    assert all(each.outcome is not None for each in made)


class Sudden(Transfer):
    """One that a thread of its backend fails, just before it is looked at for the so many-th time."""

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self.settled = False
        super().__init__()

    @property
    def outcome(self) -> Outcome | None:
        """The outcome at this look."""
        self._looks -= 1
        return Outcome(False, "the cable was pulled", settled=self.settled) if self._looks < 0 else None

    @outcome.setter
    def outcome(self, outcome: Outcome | None) -> None: ...


@pytest.mark.parametrize("looks", range(12))
def test_sees_a_failure_whenever_it_comes(
    pair: tuple[statelink.Link, statelink.Link], monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """The outcome may be set between any two looks at it, and is never lost; its memory waits until it is settled."""
    made: list[Transfer] = []
    sudden = Sudden(looks)

    def submit(self: TcpBackend, peer: str, batch: Batch) -> Transfer:
        made.append(sudden if len(made) == 1 else Transfer())
        return made[-1]

    def poll(self: TcpBackend, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            if transfer is not sudden:
                transfer.succeed()

    monkeypatch.setattr(TcpBackend, "submit", submit)
    monkeypatch.setattr(TcpBackend, "poll", poll)
    receiving, sending = begin(*pair)
    assert sending.wait(20) is receiving.wait(20) is Status.FAILED
    assert sending.reason is not None
    assert sending.reason.cause == "the cable was pulled"
    assert not sending.quiesced
    sudden.settled = True
    sending.wait(20, quiesced=True)
    assert sending.quiesced


def test_a_block_that_is_larger_than_a_library_takes_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of a little more than two MiB, side by side; what is moved is the same byte for byte."""
    mib = 1 << 20
    declared = dataclasses.replace(TcpBackend.capabilities, max_bytes=mib, max_blocks=4)
    monkeypatch.setattr(TcpBackend, "capabilities", declared)
    batches: list[Any] = []
    submit = TcpBackend.submit

    def noted(self: TcpBackend, peer: str, batch: Batch) -> Transfer:
        batches.append(batch.blocks.nbytes)
        return submit(self, peer, batch)

    monkeypatch.setattr(TcpBackend, "submit", noted)
    shape = (2, 3, 16, 1, (mib >> 3) + 1)
    source = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    target = np.zeros(shape, np.uint8)
    config = {"backend": "tcp", "inspect": False}
    p, d = (
        state.describe(name, [state.kv_pages({0: (each[0], each[1])}, heads=1)])
        for name, each in (("p", source), ("d", target))
    )
    with (
        statelink.open({"role": "prefill", **config}, p) as prefill,
        statelink.open({"role": "decode", **config}, d) as decode,
    ):
        receiving, sending = decode.receive(1, prefill.address, 48, {"kv": [0, 1, 2]}), prefill.send(1, 48)
        sending.push({"kv": [0, 1, 2]})
        assert receiving.wait(20) is Status.SUCCEEDED
        assert sending.wait(20) is Status.SUCCEEDED
    np.testing.assert_array_equal(target, source)
    assert all(nbytes.sum() <= mib and len(nbytes) <= 4 for nbytes in batches)
    assert max(nbytes.max() for nbytes in batches) == mib
    assert sum(int(nbytes.sum()) for nbytes in batches) == source.nbytes
