"""Noise and changed frames through everything that decodes: taken or refused, and no memory kept."""

from __future__ import annotations

import time

import pytest

from .noise import DECODERS, fuzz, resident

MEGABYTE = 1 << 20


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_each_decoder_takes_what_is_right(name: str) -> None:
    for raw in DECODERS[name].good:
        DECODERS[name].call(raw)


def run(frames: int, seed: int) -> None:
    fuzz(5_000, seed)  # allocators and caches are warm after this
    before = resident()
    start = time.monotonic()
    taken, refused = fuzz(frames, seed + 1)
    seconds = time.monotonic() - start
    print(f"{frames} frames in {seconds:.0f} s ({frames / seconds:.0f} a second): {taken.total()} taken")
    assert taken.total() + refused.total() == frames
    assert [name for name in DECODERS if not refused[name]] in ([], ["items"]), "noise was taken"
    assert len(taken) > 20
    assert resident() - before < 16 * MEGABYTE


def test_frames() -> None:
    run(20_000, 1)


@pytest.mark.soak
def test_a_million_frames() -> None:
    run(1_100_000, 100)
