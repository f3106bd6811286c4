"""Decoders of what a peer sends, and what is done to that: it is cut, changed, or made up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# Markers that announce much more than follows, deep nesting, and numbers at the edges of their types.
LIES = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\x91" * 3000,
    b"\x81\xa1x" * 1500,
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + b"\x00" * 7,
    b"\xcb\x7f\xf8" + b"\x00" * 6,
    b"\xc0",
    b"\xc1",
    b"\xa4\xff\xfe\xfd\xfc",
)


class Decoder(NamedTuple):
    """A function that reads bytes from a peer.

    Attributes:
        call: It.
        good: Bytes that it takes.
        refusals: The errors with which it may answer; anything else that it raises is a defect.
        codes: The codes that those of its errors have which have one; any, if none is given.
    """

    call: Callable[[bytes], Any]
    good: bytes
    refusals: tuple[type[Exception], ...]
    codes: tuple[str, ...] = ()


def mutated(rng: random.Random, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        action = rng.randrange(6)
        if action == 0:
            del data[at:]
        elif action == 1:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif action == 2:
            data[at : at + rng.randrange(9)] = rng.choice(LIES)
        elif action == 3:
            data[at:at] = data[: rng.randrange(20)]
        elif action == 4:
            del data[at : at + rng.randrange(1, 9)]
        else:
            data[at:at] = rng.randbytes(rng.randrange(12))
    return bytes(data)


def fuzz(decoders: Mapping[str, Decoder], frames: int, seed: int) -> Counter[tuple[str, str]]:
    """Put frames through the decoders: noise, the changed frames of a decoder, and some of another's.

    Returns:
        How often each decoder answered with which code, or took a frame (``taken``).
    """
    rng = random.Random(seed)
    seen: Counter[tuple[str, str]] = Counter()
    names = sorted(decoders)
    for number in range(frames):
        name = names[number % len(names)]
        decoder = decoders[name]
        if rng.random() < 0.1:
            raw = rng.randbytes(rng.choice((0, 1, 7, 48, 300)))
        else:
            raw = mutated(rng, decoders[rng.choice(names)].good if rng.random() < 0.05 else decoder.good)
        answer, text = "taken", ""
        try:
            decoder.call(raw)
        except decoder.refusals as error:
            answer, text = getattr(error, "code", type(error).__name__), str(error)
        assert answer == "taken" or not decoder.codes or answer in decoder.codes, f"{name}: {answer}: {text}"
        assert len(text) < 2000, "what a peer sends fills the log"
        seen[name, answer] += 1
    return seen


def resident(pid: int | str = "self") -> int:
    """Bytes of memory that a process has."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096
