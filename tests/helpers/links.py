"""Links in the test's own process, over little memory, and the keys that they may have."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import zmq
import zmq.utils.z85

import statelink
from statelink import LinkConfig, Status, state, wire
from statelink.rendezvous import Directory, connecting


def key_pair(number: int) -> tuple[str, str]:
    """A public and a secret key; the same in every process, and different for each number below 256."""
    secret = zmq.utils.z85.encode(bytes([number + 1]) * 32)
    return zmq.curve_public(secret).decode(), secret.decode()


PREFILL, DECODE, STRANGE = (dict(zip(("public", "secret"), key_pair(n), strict=True)) for n in range(3))


def keys(own: dict[str, str], *allowed: dict[str, str]) -> statelink.Keys:
    return statelink.Keys(secret=own["secret"], allow=tuple(each["public"] for each in allowed))


def client(address: str, link: str, keys: statelink.Keys | None = None, **options: Any) -> Directory:
    """The client of the directory at an address, as a link of this name has it."""
    config = LinkConfig(role="decode", backend="tcp", rendezvous=address, rendezvous_options=options)
    return connecting(config, link=link, keys=keys)


def named(label: str, own: dict[str, str]) -> str:
    """A name that a link with this key may have."""
    return wire.link_name(label, keys(own))


class Rank:
    """A rank's memory and its description. A page has 256 bytes for keys, and as many for values."""

    def __init__(self, name: str, fill: int = 0, pages: int = 32) -> None:
        rng = np.random.default_rng(fill)
        shape = (2, pages, 16, 2, 8)
        self.arrays: npt.NDArray[np.uint8] = (
            rng.integers(0, 256, shape, dtype=np.uint8) if fill else np.zeros(shape, np.uint8)
        )
        self.inventory = state.describe(name, [state.kv_pages({0: (self.arrays[0], self.arrays[1])}, heads=2)])

    def open(self, config: Any, **changes: Any) -> statelink.Link:
        return statelink.open(
            {"inspect": False, **config, **changes} if isinstance(config, dict) else config, self.inventory
        )


def hand_over(
    prefill: statelink.Link, decode: statelink.Link, source: Rank, target: Rank, room: int = 1
) -> tuple[Any, Any]:
    """Move one request, look at all of decode's memory, and return both rooms' reports."""
    sending = prefill.send(room, 160)
    sending.push({"kv": range(10)})
    receiving = decode.receive(room, prefill.address, 160, {"kv": range(20, 30)})
    status = receiving.wait(20)
    receiving.check()
    assert status is Status.SUCCEEDED
    assert sending.wait(10) is Status.SUCCEEDED
    expected = np.zeros_like(target.arrays)
    expected[:, 20:30] = source.arrays[:, :10]
    np.testing.assert_array_equal(target.arrays, expected)
    return sending.report, receiving.report


_written: list[Any] = []
"""Memory of links, which keep no reference to what they read and write."""


def link_of(role: str, name: str = "", **config: Any) -> statelink.Link:
    """A link over a few empty pages of 16 tokens, which nobody looks at."""
    pages = np.zeros((2, 8, 16, 2, 8), np.uint8)
    _written.append(pages)
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
