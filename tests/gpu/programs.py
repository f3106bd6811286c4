"""Programs that tests run over the stand-in GPU, in processes of their own: ``python -m tests.gpu.programs NAME``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from tools.card.device import Card
from tools.card.say import answer

import statelink
from statelink import state
from statelink.errors import StatelinkError

if TYPE_CHECKING:
    from statelink.state import Inventory

SHAPE, NBYTES = (4, 16, 256), 4 * 16 * 256


def inventory(address: int, kind: str, nbytes: int = NBYTES) -> Inventory:
    """One array as pages of keys and values."""
    region = state.Region(address, nbytes, kind)
    array = state.Memory.pointer(address, SHAPE, "uint8", 1, kind=kind, region=region)
    return state.describe("programs", [state.mla_pages({0: array})], model="programs@1")


def try_to_open(what: str, address: int, kind: str, nbytes: int = NBYTES, **config: object) -> None:
    """Say whether a link opens over this memory."""
    try:
        with statelink.open({"role": "decode", "backend": "nixl", **config}, inventory(address, kind, nbytes)):
            answer(what, "opened")
    except StatelinkError as error:
        answer(what, str(error.reason.coded))


def kinds() -> None:
    """Memory that is not what it is called is refused by the driver's word."""
    card = Card()
    buffer = card.buffer(NBYTES)
    host = np.zeros(NBYTES, np.uint8)
    try_to_open("memory of the card", buffer.address, "cuda:0")
    try_to_open("called host memory", buffer.address, "dram")
    try_to_open("called memory of another card", buffer.address, "cuda:1")
    try_to_open("longer than its allocation", buffer.address, "cuda:0", 2 * NBYTES)
    try_to_open("host memory, called memory of the card", int(host.ctypes.data), "cuda:0")
    try_to_open("memory of the card, over tcp", buffer.address, "cuda:0", backend="tcp")
    try_to_open("memory of the card, over auto", buffer.address, "cuda:0", backend="auto")


def opened() -> None:
    """Whether NIXL registers memory of the card here."""
    try_to_open("memory of the card", Card().buffer(NBYTES).address, "cuda:0")


def forked() -> None:
    """A child of a process that has started CUDA opens a link over the parent's memory."""
    buffer = Card().buffer(NBYTES)
    child = os.fork()
    if not child:
        try_to_open("in a forked child", buffer.address, "cuda:0")
        os._exit(0)
    os.waitpid(child, 0)


PROGRAMS: dict[str, Callable[[], None]] = {each.__name__: each for each in (kinds, opened, forked)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
    sys.stdout.flush()
    os._exit(0)  # UCX may crash a process at its normal end
