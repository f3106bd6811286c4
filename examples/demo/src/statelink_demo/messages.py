"""What the processes of the demo say to each other. Only prefill and the reference are told prompts."""

from typing import NamedTuple

import msgspec

CHUNK_TOKENS = 64
"""Tokens per forward pass of prefill."""


class Request(NamedTuple):
    """One request, with the pool that decode zeroes once it has arrived, if any. Decode gets it without the prompt."""

    room: int
    tokens: int
    sabotage: str
    prompt: tuple[int, ...] = ()


class Answer(NamedTuple):
    """What was generated. ``logits`` are bytes of decode's first step, in bfloat16."""

    first_token: int
    first_logprob: float
    logits: bytes
    tokens: tuple[int, ...]


class Told(msgspec.Struct):
    """What a side says of a request, with digests of its pools. Prefill says when it pushed which component, and decode
    when all was visible, how many bytes and blocks of which component came, and its answer."""

    failed: str = ""
    digests: dict[str, str] = {}
    pushed: dict[str, list[float]] = {}
    arrived: float = 0.0
    moved: dict[str, tuple[int, int]] = {}
    answer: Answer | None = None
