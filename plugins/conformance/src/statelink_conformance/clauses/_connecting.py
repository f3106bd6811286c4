"""Clauses on peers: connect, disconnect, and connect again."""

from __future__ import annotations

import numpy as np
import pytest

from statelink.backend import MAX_DESCRIPTOR, Side
from statelink.errors import TransferError

from .. import _inside
from .._bench import Pair, Subject
from .._lab import Lab, Suite, needs
from .._saying import all_moved, refused
from ._refusing import not_moved

__all__ = ["Connecting"]

BLOCKS_AT_ONCE = 8
"""Blocks of each batch of moves that run at once: more than a hundred calls for each peer meet those for the other."""


class Connecting(Suite):
    """Connecting and disconnecting peers."""

    def test_a_descriptor_is_bytes_and_bounded(self, pair: Pair) -> None:
        """A descriptor is bytes, at most `MAX_DESCRIPTOR`, and the same when it is asked for again.

        Return the same bytes with each call; what peers need later is asked for then.
        """
        found = pair.source.call(_inside.descriptor)
        assert 0 < len(found) <= MAX_DESCRIPTOR, f"descriptor() returned {len(found)} bytes; at most {MAX_DESCRIPTOR}"
        assert pair.source.call(_inside.descriptor) == found, "a second call returned other bytes"

    @pytest.mark.parametrize("first", ["source", "target"])
    def test_either_side_connects_first(self, lab: Lab, first: str) -> None:
        """The two sides connect in any order.

        Do not wait in `connect` for the other side to connect.
        """
        pair = Pair(lab.end(0).open(), lab.end(1).open())
        sides = (pair.source, pair.target) if first == "source" else (pair.target, pair.source)
        sides[0].connect(sides[1])
        sides[1].connect(sides[0])
        pair.works()

    def test_a_peer_that_never_connects_is_forgotten(self, lab: Lab) -> None:
        """A source connects to a peer that does not connect, is disconnected from it, and connects to it later.

        A link of prefill connects ahead, and the other side may not need it. Let `disconnect` free what there is.
        """
        pair = Pair(lab.end(0).open(), lab.end(1).open())
        pair.source.connect(pair.target)
        pair.source.disconnect(pair.target)
        pair.connect()
        pair.works()

    def test_a_peer_can_be_forgotten_and_connected_again(self, pair: Pair) -> None:
        """After a disconnect, moves to that peer are refused; after another connect they work.

        Let `submit` raise a `TransferError` for a peer that is not connected, and let `connect` make a new connection.
        """
        for _ in range(2):
            pair.source.disconnect(pair.target)
            pair.fill()
            with refused("a move to a peer that was disconnected", TransferError):
                pair.move(pair.blocks([(0, 0, 0, 0, 100)]))
            pair.untouched()
            pair.connect()
            pair.works()

    def test_disconnecting_twice_or_from_nobody_is_ignored(self, pair: Pair) -> None:
        """A peer that is not connected is ignored when it is disconnected.

        Let `disconnect` return where the peer is unknown.
        """
        pair.source.call(_inside.disconnect, "nobody")
        for _ in range(2):
            pair.source.disconnect(pair.target)
        pair.connect()
        pair.works()

    def test_connecting_twice_replaces_the_connection(self, pair: Pair) -> None:
        """A peer that is connected is connected again, as after a loss that only one side saw.

        Let `connect` close the connection that there is, and make a new one.
        """
        pair.source.connect(pair.target)
        pair.target.connect(pair.source)
        pair.works()

    def test_connecting_again_replaces_the_region_table(self, pair: Pair) -> None:
        """A peer that is connected again with fewer regions has no others: a block in one that is gone is refused.

        Keep the region table of the last `connect`, and no other. Or refuse a table that does not fit the descriptor.
        """
        here, there = pair.source, pair.target
        gone = pair.blocks([(3, 10, 3, 20, 100)])
        pair.fill(4)
        pair.grant(gone, 61)
        try:
            here.call(_inside.connect, there.link, there.descriptor, there.regions[:-1])
        except TransferError:
            pass
        else:
            not_moved(pair, gone, 61)
            pair.untouched()
        if pair.needs_grants():
            pair.take_back(61)
        pair.connect()
        pair.works()

    def test_a_peer_of_another_life_can_be_connected(self, lab: Lab) -> None:
        """A peer that was closed and opened again under another name is one more peer.

        Keep everything about a peer under its name, and forget it at its `disconnect`.
        """
        pair = lab.pair()
        pair.works()
        pair.source.disconnect(pair.target)
        pair.target.call(_inside.close)
        again = Pair(pair.source, lab.end(1).open()).connect()
        again.works()

    def test_a_damaged_descriptor_is_refused(self, pair: Pair) -> None:
        """Garbage, part of a descriptor, and a descriptor of another backend are refused; nothing else suffers.

        Check all of a descriptor before the library sees it (a format, a length), and raise a `TransferError`.
        """
        good, rng = pair.target.descriptor, np.random.default_rng(4)
        cases = [b"", b"\0", b"\xff" * 100, b"SLTCP\x01", b"{}", rng.bytes(64), rng.bytes(4096), rng.bytes(len(good))]
        cases += [good[: len(good) * part // 8] for part in range(1, 8)]
        cases += [good[:-1], good[1:], good + b"\0", good[: len(good) // 2] + rng.bytes(len(good) - len(good) // 2)]
        for number, raw in enumerate(cases):
            accepted = self._connects(pair, "nobody", raw)
            assert not accepted, f"descriptor {number} of {len(cases)} was accepted: {raw[:60]!r}"
        pair.works()

    def test_a_descriptor_of_somebody_else_is_refused(self, pair: Pair) -> None:
        """A good descriptor under a name that is not its owner's is refused.

        Put the name of the link into the descriptor, and compare it with the peer that `connect` names.
        """
        assert not self._connects(pair, "nobody", pair.target.descriptor), "it was accepted"
        pair.works()

    def test_a_descriptor_with_a_flipped_bit_harms_nobody(self, pair: Pair) -> None:
        """Where a flipped bit cannot be noticed, at least nothing but this peer suffers.

        Refuse it, or let what it leads to fail for this peer only.
        """
        good, rng = pair.target.descriptor, np.random.default_rng(5)
        for _ in range(8):
            raw = bytearray(good)
            raw[int(rng.integers(len(raw)))] ^= 1 << int(rng.integers(8))
            self._connects(pair, pair.target.link, bytes(raw))
        pair.connect()
        pair.works()

    def test_two_links_of_one_process_reach_each_other(self, subject: Subject, lab: Lab) -> None:
        """Two links of one process reach each other, if that is declared.

        Declare `single_process=False` if the library cannot do that.
        """
        needs(subject.capabilities.single_process, "it does not declare it")
        ends = [lab.end(0, ((100_000,),), side=side).open() for side in (Side.SOURCE, Side.TARGET)]
        pair = Pair(*ends).connect()
        pair.fill(8)
        pair.carry(pair.blocks([(0, 1, 0, 2, 70_001)]))

    def test_it_tells_the_transport_of_a_peer(self, subject: Subject, lab: Lab) -> None:
        """`transport` answers for a connected peer, on both sides, before and after a move, and never raises.

        Return words from `transports(options)`, joined by `+`, or `UNKNOWN` where it cannot be found out.
        """
        needs(hasattr(subject.kind, "transport"), "it does not tell its transport")
        pair, options = lab.pair(), dict(subject.options)
        for when in ("after a connect", "after a move"):
            for end, peer in ((pair.source, pair.target), (pair.target, pair.source)):
                problem = end.call(_inside.transport, peer.link, options)
                assert not problem, f"{when}, at the {end.role} side: {problem}"
            pair.works()

    def test_several_peers_are_served_at_once(self, lab: Lab) -> None:
        """Moves to several peers run side by side, each peer's in a thread of its own.

        Keep what belongs to one peer apart from the others, or declare `thread_safe=False`.
        """
        here = lab.end(0, side=Side.SOURCE).open()
        there = [lab.end(1, side=Side.TARGET).open() for _ in range(2)]
        pairs = [Pair(here, each) for each in there]
        for number, pair in enumerate(pairs):
            pair.connect()
            pair.fill(1 + number)
        half = here.regions[0].nbytes // 2
        # Each moves its own half, so that no byte of one peer is that of the other.
        blocks = [
            pair.blocks([(0, at + by, 0, at + by, 4099) for at in range(0, half - 5000, 4111)])
            for pair, by in zip(pairs, (0, half), strict=True)
        ]
        expected = [pair.target.memory.copy() for pair in pairs]
        for pair, each, wanted in zip(pairs, blocks, expected, strict=True):
            pair.grant(each)
            pair.expected(each, wanted)
        orders = [pair.order(each) for pair, each in zip(pairs, blocks, strict=True)]
        found = here.worker(_inside.at_once, orders, BLOCKS_AT_ONCE, pairs[0].subject.patience)
        all_moved([outcome for outcomes in found for outcome in outcomes])
        for pair, wanted in zip(pairs, expected, strict=True):
            pair.verify(wanted)

    def _connects(self, pair: Pair, name: str, raw: bytes) -> bool:
        """Whether a descriptor is accepted; it may only be refused with a `TransferError`."""
        try:
            pair.source.call(_inside.connect, name, raw, pair.target.regions)
        except TransferError:
            return False
        pair.source.call(_inside.disconnect, name)
        return True
