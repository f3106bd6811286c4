"""`benchmarks.long_line`: bytes take a long line and nothing else, and what cannot run is refused."""

from __future__ import annotations

import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from benchmarks import long_line, namespaces
from benchmarks.namespaces import SPACES, Line

SHORT = Line(40, mbit=200, queue_ms=100)


@pytest.fixture
def lines(root: None) -> None:
    """Long lines can be made here."""
    if problem := namespaces.missing():
        pytest.skip(problem)


@pytest.mark.usefixtures("lines")
def test_a_row_has_the_requests_beside_the_streams() -> None:
    row = long_line.measure("tcp", SHORT, 1, (2,))
    assert (row["line"], row["mbit"], row["backend"]) == ("40 ms", 200, "tcp")
    for name in ("ours", "plain_1", "plain_4", "plain_8"):
        # At this rate, the bytes of 2 MiB take 84 ms, and nothing takes less than a round trip more.
        assert 0 < row[f"{name}_2"] < 0.7
    assert 40 <= row["answer_ms"] <= row["answer_beside_ms"]
    assert row["answer_may_take_ms"] == 180
    assert row["of_best_2"].median > 0


@pytest.mark.usefixtures("lines")
def test_packets_are_late_are_lost_and_do_not_come_while_the_line_is_silent() -> None:
    def exchange() -> float:
        """Seconds of a round trip."""
        began = time.monotonic()
        near.send(b"?")
        assert near.recv(9) == b"?"
        return time.monotonic() - began

    def opened(role: str) -> socket.socket:
        namespaces.enter(role)
        sock = socket.socket(type=socket.SOCK_DGRAM)
        sock.bind((SPACES[role][1], 7500))
        return sock

    def echo() -> None:
        while (packet := far.recvfrom(2000))[0]:
            far.sendto(*packet)

    with (
        ThreadPoolExecutor(1) as one,
        ThreadPoolExecutor(1) as other,
        namespaces.joined(Line(40, lost=500)) as carriers,
    ):
        near, far = one.submit(opened, "decode").result(), other.submit(opened, "prefill").result()
        with near, far:
            near.connect(far.getsockname())
            near.settimeout(0.5)
            echoes = other.submit(echo)
            came = 0
            for _ in range(60):
                near.send(b"?")
            for _ in range(60):
                try:
                    came += near.recv(9) == b"?"
                except TimeoutError:
                    break
            assert 1 <= came <= 40, "a quarter of them comes back"
            for carrier in carriers:
                carrier.send_signal(signal.SIGSTOP)
            near.send(b"?" * 3)
            with pytest.raises(TimeoutError):
                near.recv(9)
            for carrier in carriers:
                carrier.send_signal(signal.SIGCONT)
            while not echoes.done():
                far.sendto(b"", far.getsockname())
