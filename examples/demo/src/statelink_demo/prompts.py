"""Prompts without a tokenizer: token ids drawn from a seed."""

from __future__ import annotations

import random

__all__ = ["make_prompt"]


def make_prompt(seed: int, length: int, vocab_size: int = 512) -> tuple[int, ...]:
    """Return `length` token ids that depend on `seed` alone."""
    rng = random.Random(seed)
    return tuple(rng.randrange(vocab_size) for _ in range(length))
