"""Clauses on rooms, through real links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from statelink import Status
from statelink.backend import Fence

from .. import _inside, _rooms
from .._lab import Lab, Suite, needs
from .._memory import POISON
from .._rooms import PAGES, TOKENS, LinkEnd, Seen

if TYPE_CHECKING:
    from .._bench import Subject

__all__ = ["Rooms"]

COUNT = TOKENS // 4
MIDDLE = TOKENS // 2
Ids = npt.NDArray[np.int64]
Links = tuple[LinkEnd, LinkEnd]


class Rooms(Suite):
    """Requests between a prefill and a decode."""

    @pytest.fixture
    def links(self, subject: Subject, lab: Lab) -> Links:
        """A prefill and a decode. Other clauses use them after this one."""
        return lab.links_for_all()

    def test_a_request_arrives(self, links: Links) -> None:
        """A request arrives in two pushes: both sides succeed and quiesce, and no other page changes.

        See the clauses on moves first.
        """
        self._works(links, 11)

    def test_a_room_id_can_be_used_again(self, links: Links) -> None:
        """A room id is free once its room has ended and quiesced.

        Tell uses of a room apart by their generation, if it is kept at all.
        """
        for _ in range(3):
            self._works(links, 12)

    @pytest.mark.parametrize("side", ["prefill", "decode"])
    def test_a_link_is_suspended_and_resumed(self, links: Links, side: str) -> None:
        """A link closes its backend, and makes a new one over the same memory. Its peer's backend connects again.

        Let `close` give up all memory, and keep nothing that stands in the way of another object with the same name.
        """
        prefill, decode = links
        this = prefill if side == "prefill" else decode
        self._works(links, 13)
        this(_rooms.suspend, this.subject.patience)
        decode.keys[:] = decode.values[:] = POISON
        here, there = self._pages(14)
        if this is prefill:
            decode(_rooms.receive, 14, prefill.address, there)
        else:
            prefill(_rooms.send, 14)
            prefill(_rooms.push, 14, here)
        this(_rooms.resume)
        if this is prefill:
            prefill(_rooms.send, 14)
            prefill(_rooms.push, 14, here)
        else:
            decode(_rooms.receive, 14, prefill.address, there)
        self._succeeded(decode, 14)
        self._succeeded(prefill, 14)
        self._arrived(links, here, there)
        self._works(links, 13)

    def test_rooms_go_on_side_by_side(self, links: Links) -> None:
        """Rooms of one pair of links, opened and pushed in any order, arrive each in its place.

        Keep what belongs to one transfer apart from the others of its peer.
        """
        prefill, decode = links
        rooms = {100 + n: (np.arange(n, PAGES, 6), np.arange(PAGES - 1 - n, -1, -6)) for n in range(6)}
        decode.keys[:] = decode.values[:] = POISON
        tokens = 4 * len(rooms[100][0])
        early = [room for room in rooms if room % 2]
        for room in early:
            decode(_rooms.receive, room, prefill.address, rooms[room][1], tokens)
        for room in rooms:
            prefill(_rooms.send, room, tokens)
        for room, (here, _) in reversed(rooms.items()):
            prefill(_rooms.push, room, here, 0, tokens)
        for room in rooms.keys() - early:
            decode(_rooms.receive, room, prefill.address, rooms[room][1], tokens)
        for room, (here, there) in rooms.items():
            for end in (decode, prefill):
                self._succeeded(end, room)
            self._arrived(links, here, there)

    def test_two_links_send_to_each_other(self, lab: Lab, subject: Subject) -> None:
        """Two links of the role ``both`` send to each other at the same time, under the same room ids.

        Keep what a peer writes apart from what this side writes to it; or declare `both_roles` as false.
        """
        needs(subject.capabilities.both_roles, "it declares that one of its objects either sends or receives")
        rooms = range(501, 505)
        lab.ready()
        with lab.links_of_both_roles() as ends:
            receivers = [end.receiver() for end in ends]
            whole = [(end.keys.copy(), end.values.copy()) for end in ends]
            here = {room: np.arange(room - rooms[0], PAGES // 2, len(rooms)) for room in rooms}
            there = {room: PAGES - 1 - pages for room, pages in here.items()}
            tokens = 4 * len(here[rooms[0]])
            for room in rooms:
                for end, receiver, peer in zip(ends, receivers, reversed(ends), strict=True):
                    receiver(_rooms.receive, room, peer.address, there[room], tokens)
                    end(_rooms.send, room, tokens)
                    end(_rooms.push, room, here[room], 0, tokens)
            for room in rooms:
                for end in (*ends, *receivers):
                    self._succeeded(end, room)
            for end, (keys, values) in zip(ends, reversed(whole), strict=True):
                for room in rooms:
                    assert np.array_equal(end.keys[there[room]], keys[here[room]]), "keys are not what they should be"
                    assert np.array_equal(end.values[there[room]], values[here[room]]), "values are not what they were"
            for end, (keys, values) in zip(ends, whole, strict=True):
                assert np.array_equal(end.keys[: PAGES // 2], keys[: PAGES // 2]), "what was sent has changed"
                assert np.array_equal(end.values[: PAGES // 2], values[: PAGES // 2]), "what was sent has changed"

    @pytest.mark.parametrize("phase", ["alone", "waiting", "halfway", "moving"])
    @pytest.mark.parametrize("side", ["prefill", "decode"])
    def test_an_aborted_room_ends_on_both_sides(self, subject: Subject, links: Links, side: str, phase: str) -> None:
        """A room that is given up ends with a reason and quiesces on both sides. After that, nothing lands.

        Let every transfer end in time, with an outcome that says where its bytes have stopped.
        """
        prefill, decode = links
        room = 200 + 10 * len(phase) + len(side)
        ending, other = (prefill, decode) if side == "prefill" else (decode, prefill)
        here, there = self._pages(room)
        decode.keys[:] = decode.values[:] = POISON
        if phase != "alone" or side == "prefill":
            prefill(_rooms.send, room)
        if phase != "alone" or side == "decode":
            decode(_rooms.receive, room, prefill.address, there)
        if phase in ("waiting", "halfway"):
            self._reached(other, room, Status.WAITING)
        if phase == "halfway":
            prefill(_rooms.push, room, here[: COUNT // 2], 0, MIDDLE)
            prefill(_rooms.push, room, here[COUNT // 2 :], MIDDLE, TOKENS, True)
        if phase == "moving":
            prefill(_rooms.push, room, here)
        ending(_rooms.abort, room)
        seen = ending.wait(room)
        self._gave_up(seen, phase)
        if phase != "alone":
            after = other.wait(room)
            self._gave_up(after, phase)
            if after.reason is not None and seen.reason is not None:
                codes = seen.reason.code, after.reason.code
                # Prefill may learn that decode's fence refused a transfer before it learns why.
                fenced = subject.capabilities.target is Fence.OWNER
                moves = phase in ("halfway", "moving")
                refused = fenced and side == "decode" and moves and codes[1] == "backend.transfer"
                same = codes[0] == codes[1] or refused
                assert same, f"the two sides failed for different reasons: {' and '.join(codes)}"
        self._silent(decode, there)
        self._works(links, room + 1000)
        if phase != "alone":
            self._works(links, room)

    def test_decode_outlives_prefill(self, links: Links, lab: Lab) -> None:
        """Prefill dies in the middle of a request: decode's room fails with a reason, and others are served.

        Look at the clauses on peers that die.
        """
        mortal = LinkEnd(lab.subject, lab.borrow(), "prefill", "mortal", 0)
        _, decode = links
        here, there = self._pages(301)
        decode.keys[:] = decode.values[:] = POISON
        decode(_rooms.receive, 301, mortal.address, there)
        mortal(_rooms.send, 301)
        mortal(_rooms.push, 301, here[: COUNT // 2], 0, MIDDLE)
        self._reached(decode, 301, Status.TRANSFERRING)
        mortal.worker.kill()
        seen = decode.wait(301, quiesced=False)
        assert seen.status is Status.FAILED, f"the room of a dead peer is {seen.status.name}"
        assert seen.reason is not None, "the room of a dead peer failed without a reason"
        if decode(_rooms.reach, 301, Status.FAILED, 1.0).quiesced:
            self._silent(decode, there)
        self._works(links, 302, busy=there)
        lab.close_links(0.1)  # what the dead may have been writing to is not given back

    def test_prefill_outlives_decode(self, links: Links, lab: Lab) -> None:
        """Decode dies in the middle of a request: prefill's room fails with a reason, and others are served.

        Look at the clauses on peers that die.
        """
        mortal = LinkEnd(lab.subject, lab.borrow(), "decode", "mortal", 0)
        prefill, _ = links
        here, there = self._pages(311)
        mortal(_rooms.receive, 311, prefill.address, there)
        prefill(_rooms.send, 311)
        prefill(_rooms.push, 311, here[: COUNT // 2], 0, MIDDLE)
        self._reached(prefill, 311, Status.TRANSFERRING)
        mortal.worker.kill()
        prefill(_rooms.push, 311, here[COUNT // 2 :], MIDDLE, TOKENS)
        seen = prefill.wait(311, quiesced=False)
        assert seen.status is Status.FAILED, f"the room of a dead peer is {seen.status.name}"
        assert seen.reason is not None, "the room of a dead peer failed without a reason"
        self._works(links, 312)
        lab.close_links(0.1)  # a library that cannot tell where a failed move stopped still counts as reading

    def test_links_come_to_rest(self, lab: Lab, links: Links) -> None:
        """Closing a link ends its transfers and its threads, and a link may be closed twice.

        Let every transfer end, and `close` return.
        """
        self._works(links, 401)
        assert lab.close_links(lab.subject.patience), "a link did not come to rest"

    def _works(self, links: Links, room: int, busy: Ids | Sequence[int] = ()) -> None:
        """Move a request in two pushes, and compare every page of decode."""
        prefill, decode = links
        here, there = self._pages(room)
        free = [page for page in range(PAGES) if page not in set(busy)]
        there = np.array([page for page in there if page in free] + [page for page in free if page not in there])[
            :COUNT
        ]
        decode.keys[:] = decode.values[:] = POISON
        before = prefill.keys.copy(), prefill.values.copy()
        decode(_rooms.receive, room, prefill.address, there)
        prefill(_rooms.send, room)
        prefill(_rooms.push, room, here[: COUNT // 2], 0, MIDDLE)
        prefill(_rooms.push, room, here[COUNT // 2 :], MIDDLE, TOKENS)
        self._succeeded(decode, room)
        self._succeeded(prefill, room)
        self._arrived(links, here, there)
        rest = np.setdiff1d(np.array(free), there)
        assert (decode.keys[rest] == POISON).all(), "pages of others were touched"
        assert (decode.values[rest] == POISON).all(), "pages of others were touched"
        assert np.array_equal(prefill.keys, before[0]), "prefill's pages were changed"
        assert np.array_equal(prefill.values, before[1]), "prefill's pages were changed"

    def _succeeded(self, end: LinkEnd, room: int) -> None:
        seen = end.wait(room)
        assert seen.status is Status.SUCCEEDED, f"room {room} of {end.key} is {seen.status.name}: {seen.reason}"

    def _reached(self, end: LinkEnd, room: int, status: Status) -> None:
        seen: Seen = end(_rooms.reach, room, status, end.subject.patience)
        assert seen.status is status, f"room {room} of {end.key} is {seen.status.name}: {seen.reason}"

    def _gave_up(self, seen: Seen, phase: str) -> None:
        """Check that a room failed with a reason, or succeeded because it was already moving."""
        done = seen.status is Status.SUCCEEDED and phase == "moving"
        assert done or seen.status is Status.FAILED, f"a room that was given up is {seen.status.name}"
        assert done == (seen.reason is None), f"a room that is {seen.status.name} has the reason {seen.reason}"

    def _arrived(self, links: Links, here: Ids | Sequence[int], there: Ids | Sequence[int]) -> None:
        prefill, decode = links
        assert np.array_equal(decode.keys[there], prefill.keys[here]), "keys are not what they should be"
        assert np.array_equal(decode.values[there], prefill.values[here]), "values are not what they should be"

    def _silent(self, decode: LinkEnd, pages: Ids | Sequence[int]) -> None:
        """Check that nothing more lands in the pages, and that other pages are unchanged."""
        others = np.setdiff1d(np.arange(PAGES), pages)
        assert (decode.keys[others] == POISON).all(), "pages of others were touched"
        decode.keys[pages] = decode.values[pages] = POISON
        decode.worker(_inside.rest, 0.1)
        assert (decode.keys == POISON).all(), "bytes landed after the room had come to rest"
        assert (decode.values == POISON).all(), "bytes landed after the room had come to rest"

    def _pages(self, room: int) -> tuple[Ids, Ids]:
        rng = np.random.default_rng(room)
        return rng.permutation(PAGES)[:COUNT], rng.permutation(PAGES)[:COUNT]
