"""Rooms over a long line between two network namespaces, with the defaults."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from benchmarks import namespaces
from benchmarks.namespaces import SPACES, Line
from tests.helpers.links import Rank
from tests.helpers.peers import until

import statelink
from statelink import Receiving, Sending, Status
from statelink.errors import StatelinkError

if TYPE_CHECKING:
    import subprocess

PAGES = 1 << 15
"""16 MiB."""


class Ends:
    """Two links, each in the network of its role."""

    def __init__(self, carriers: list[subprocess.Popen[bytes]], undo: contextlib.ExitStack) -> None:
        self.carriers = carriers
        self.ranks = {role: Rank(role, fill, PAGES) for role, fill in (("prefill", 1), ("decode", 0))}
        self.links = {role: undo.enter_context(self._opened(role)) for role in SPACES}
        self._room = 0

    def _opened(self, role: str) -> statelink.Link:
        config = {"role": role, "backend": "tcp", "listen": f"tcp://{SPACES[role][1]}:0", "insecure": True}

        def open_there() -> statelink.Link:
            namespaces.enter(role)
            return self.ranks[role].open(config | {"options": {"same_host_copy": False}})

        with ThreadPoolExecutor(1) as thread:  # a link's threads are where the one is that opened it
            return thread.submit(open_there).result()

    def begin(self, pages: int = PAGES) -> tuple[Sending, Receiving]:
        """Begin a room of so many pages."""
        self._room += 1
        self.ranks["decode"].arrays[:] = 0
        sending = self.links["prefill"].send(self._room, 16 * pages)
        sending.push({"kv": range(pages)})
        return sending, self.links["decode"].receive(
            self._room, self.links["prefill"].address, 16 * pages, {"kv": range(pages)}
        )

    def succeed(self, sending: Sending, receiving: Receiving, pages: int = PAGES) -> None:
        receiving.wait(60)
        receiving.check()
        assert sending.wait(60) is Status.SUCCEEDED
        np.testing.assert_array_equal(self.ranks["decode"].arrays[:, :pages], self.ranks["prefill"].arrays[:, :pages])

    def silence(self, seconds: float) -> None:
        """Let nothing come through for so long."""
        for sent in (signal.SIGSTOP, signal.SIGCONT):
            for carrier in self.carriers:
                carrier.send_signal(sent)
            time.sleep(seconds if sent is signal.SIGSTOP else 0)


@pytest.fixture
def ends(root: None, request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Both ends of the line that a test asks for."""
    if problem := namespaces.missing():
        pytest.skip(problem)
    with namespaces.joined(request.param) as carriers, contextlib.ExitStack() as undo:
        yield Ends(carriers, undo)


def connections() -> int:
    return sum(each.name.startswith("tcp-receive-") for each in threading.enumerate())


@pytest.mark.parametrize("ends", [Line(20)], indirect=True)
def test_pieces_of_a_large_request_take_several_connections_and_small_ones_take_one(ends: Ends) -> None:
    ends.succeed(*ends.begin(1), 1)
    assert connections() == 1
    ends.succeed(*ends.begin())
    assert 4 < connections() <= 8, "there are as many as over a short line"


@pytest.mark.parametrize("ends", [Line(300)], indirect=True)
def test_rooms_succeed_over_a_very_long_line(ends: Ends) -> None:
    for pages in (1, PAGES):
        ends.succeed(*ends.begin(pages), pages)


@pytest.mark.soak
@pytest.mark.parametrize("ends", [Line(100, mbit=100)], indirect=True)
def test_rooms_survive_a_silence_of_5_s_and_no_peer_is_lost(ends: Ends) -> None:
    ends.succeed(*ends.begin(1), 1)
    room = ends.begin()
    until(lambda: ends.ranks["decode"].arrays[:, :PAGES].any(), what="a byte")
    ends.silence(5)
    ends.succeed(*room)


@pytest.mark.soak
@pytest.mark.parametrize("ends", [Line(100, mbit=100)], indirect=True)
def test_after_a_silence_of_20_s_both_sides_have_failed_by_name_and_come_back(ends: Ends) -> None:
    ends.succeed(*ends.begin(1), 1)
    room = ends.begin()
    until(lambda: ends.ranks["decode"].arrays[:, :PAGES].any(), what="a byte")
    ends.silence(20)
    for side in room:
        assert side.wait(30) is Status.FAILED
        with pytest.raises(StatelinkError, match=r"was lost .* it has been silent for") as found:
            side.check()
        assert found.value.code == "peer.lost"

    def moves() -> bool:
        again = ends.begin(1)
        return all(side.wait(30) is Status.SUCCEEDED for side in again)

    until(moves, 60, what="a room after the silence")
