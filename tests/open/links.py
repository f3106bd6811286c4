"""Links of this process, over small pools that stay where they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from statelink import Link, Status, state
from statelink import open as open_link

__all__ = ["Rank", "hand_over"]


class Rank:
    """A rank's memory and its description."""

    def __init__(self, name: str, fill: int = 0) -> None:
        rng = np.random.default_rng(fill)
        shape = (2, 32, 16, 2, 8)
        self.arrays: npt.NDArray[np.uint8] = (
            rng.integers(0, 256, shape, dtype=np.uint8) if fill else np.zeros(shape, np.uint8)
        )
        self.inventory = state.describe(name, [state.kv_pages({0: (self.arrays[0], self.arrays[1])}, heads=2)])

    def open(self, config: Any, **changes: Any) -> Link:
        return open_link(
            {"inspect": False, **config, **changes} if isinstance(config, dict) else config, self.inventory
        )


def hand_over(prefill: Link, decode: Link, source: Rank, target: Rank) -> tuple[Any, Any]:
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
