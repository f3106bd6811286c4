"""What a world of the model is made of, what goes wrong in it, and one request in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from .process import WIDTH

if TYPE_CHECKING:
    from .process import Held, Process

__all__ = ["REUSE", "Faults", "Request", "Shape"]


class Shape(NamedTuple):
    """What a world is made of.

    Attributes:
        prefill: Ranks of prefill.
        decode: Ranks of decode.
        owner_fence: Whether memory's owner can stop the bytes.
        staged: Components that go through rings. Where some do, the end of a process can be proven: what it held of a
            small ring would be missed for good.
        ring: Bytes of a ring.
        reuse: How ids are used again; see `REUSE`.
        both: Whether every process sends and receives, under the same ids.
        prompt: Whether no call of the library blocks. Then memory's owner can stop the bytes.
        directory: Whether decode's engine names an instance, and a directory says where it is, sometimes late.
        takes_back: Whether memory of failed rooms is taken back before there is proof, on every other process by the
            option ``take_back_after``, and on the others by engines. Then everything is staged,
            so that nobody writes to that memory but the process itself.
        mixed: Whether engines state which request a room is for, and a router sometimes gives one of them another
            request under the same id.
    """

    prefill: int
    decode: int
    owner_fence: bool
    staged: tuple[str, ...] = ()
    ring: int = 0
    reuse: str = ""
    both: bool = False
    prompt: bool = False
    directory: bool = False
    takes_back: bool = False
    mixed: bool = False


REUSE = ("", "stated", "counted")
"""A router may wait until nobody uses an id any more. Or engines state the content of each use, and it hands an
id out at any time. Or every rank takes up every use of it, in their order, each as soon as its own side of the one
before is over."""


class Faults(NamedTuple):
    """How likely things go wrong, each time that they can; and how likely a flight stands still for a step."""

    drop: float = 0.0
    repeat: float = 0.0
    reorder: float = 0.0
    transfer: float = 0.0
    submit: float = 0.0
    connect: float = 0.0
    slow: float = 0.0
    stuck: float = 0.0
    stray: float = 0.0


class Request:
    """One request, as the router sees it.

    Attributes:
        key: Its room id; below zero for a request that goes from the decode instance to the prefill instance.
    """

    def __init__(self, key: int, number: int, tokens: int) -> None:
        self.key = key
        self.number = number
        self.tokens = tokens
        self.over = False
        self.sides: dict[str, Held] = {}
        self.taken: set[str] = set()

    @property
    def room(self) -> int:
        """Its room id."""
        return abs(self.key)

    def sent_by(self, process: Process) -> bool:
        """Whether a process is on the side that sends."""
        return (process.role == "prefill") == (self.key > 0)

    def bytes_at(self, layer: int, position: int) -> npt.NDArray[np.uint8]:
        """What belongs there; different for every request, layer and position (-1: the slot)."""
        value = (self.number * 31 + layer * 97 + (position + 2) * 7) % 250
        return np.full(WIDTH, value, np.uint8) ^ np.array([0, 1, 2, self.number % 4], np.uint8)

    def __repr__(self) -> str:
        return f"request {self.number} (room {self.key}, {self.tokens} tokens)"
