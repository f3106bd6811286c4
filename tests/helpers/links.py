"""Links in the test's own process, over little memory, and what strangers do to their ports."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

import statelink
from statelink import Status, state

__all__ = ["DECODE", "PREFILL", "STRANGE", "Rank", "Recorder", "connect", "hand_over", "keys", "link_of", "state_of"]

_keys = [tuple(part.decode() for part in zmq.curve_keypair()) for _ in range(3)]
PREFILL, DECODE, STRANGE = ({"public": public, "secret": secret} for public, secret in _keys)


def keys(own: dict[str, str], *allowed: dict[str, str]) -> statelink.Keys:
    return statelink.Keys(secret=own["secret"], allow=tuple(each["public"] for each in allowed))


class Rank:
    """A rank's memory and its description."""

    def __init__(self, name: str, fill: int = 0) -> None:
        rng = np.random.default_rng(fill)
        shape = (2, 32, 16, 2, 8)
        self.arrays: npt.NDArray[np.uint8] = (
            rng.integers(0, 256, shape, dtype=np.uint8) if fill else np.zeros(shape, np.uint8)
        )
        self.inventory = state.describe(name, [state.kv_pages({0: (self.arrays[0], self.arrays[1])}, heads=2)])

    def open(self, config: Any, **changes: Any) -> statelink.Link:
        return statelink.open(
            {"inspect": False, **config, **changes} if isinstance(config, dict) else config, self.inventory
        )


def hand_over(prefill: statelink.Link, decode: statelink.Link, source: Rank, target: Rank) -> tuple[Any, Any]:
    """Move one request, look at all of decode's memory, and return both rooms' reports."""
    sending = prefill.send(1, 160)
    sending.push({"kv": range(10)})
    receiving = decode.receive(1, prefill.address, 160, {"kv": range(20, 30)})
    status = receiving.wait(20)
    receiving.check()
    assert status is Status.SUCCEEDED
    assert sending.wait(10) is Status.SUCCEEDED
    expected = np.zeros_like(target.arrays)
    expected[:, 20:30] = source.arrays[:, :10]
    np.testing.assert_array_equal(target.arrays, expected)
    return sending.report, receiving.report


def link_of(role: str, name: str = "", **config: Any) -> statelink.Link:
    """A link over a few empty pages of 16 tokens, which nobody looks at."""
    pages = np.zeros((2, 8, 16, 2, 8), np.uint8)
    inventory = state.describe(name or role, [state.kv_pages({0: (pages[0], pages[1])}, heads=2)])
    return statelink.open({"role": role, "backend": "tcp", **config}, inventory)


def state_of(link: statelink.Link) -> dict[str, Any]:
    """Everything that a link says of itself, but the counts of what it dropped or remembers, and how old things are."""
    seen = link.snapshot()
    counts = ("dropped_frames", "refused_keys", "load")
    for rank in (*seen["ranks"], *seen["oldest"]):
        rank.pop("age", None)
        rank.pop("heard", None)
    return {name: value for name, value in seen.items() if name not in counts}


def connect(address: str) -> socket.socket:
    """A bare connection to ``tcp://host:port``, whatever follows."""
    host, _, port = address.partition("|")[0].removeprefix("tcp://").rpartition(":")
    made = socket.create_connection((host, int(port)), timeout=10)
    made.settimeout(20)
    return made


class Recorder:
    """Stands between a caller and a port, and keeps what the caller says."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.said: list[bytes] = []
        self._open = [self._server]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            ours, _ = self._server.accept()
            theirs = socket.create_connection(self._target)
            self._open += [ours, theirs]
            for source, target, keep in ((ours, theirs, True), (theirs, ours, False)):
                thread = threading.Thread(target=self._carry, args=(source, target, keep), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _carry(self, source: socket.socket, target: socket.socket, keep: bool) -> None:
        with contextlib.suppress(OSError):
            while raw := source.recv(1 << 16):
                if keep:
                    self.said.append(raw)
                target.sendall(raw)

    def replay(self, host: str, port: int) -> bool:
        """Say it again, piece by piece as it was said; whether the port cut us off."""
        with socket.create_connection((host, port), timeout=10) as again:
            again.settimeout(0.1)
            for piece in [*self.said, b""]:
                try:
                    again.sendall(piece)
                    if not again.recv(1 << 16):
                        return True
                except TimeoutError:
                    continue
                except OSError:
                    return True
        return False

    def close(self) -> None:
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(10)
        for each in self._open:
            each.close()
