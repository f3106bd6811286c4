"""What the demo's processes say to one another over their pipes.

The parent sends work, its workers answer with events. Only prefill and the reference are told prompts.
"""

from __future__ import annotations

from typing import Literal

import msgspec

CHUNK_TOKENS = 64
"""Tokens per forward pass of prefill."""

Role = Literal["reference", "prefill", "decode"]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for; every worker is started with it.

    Attributes:
        backend: Name of the backend.
        requests: Concurrent requests of each run.
        tokens: Tokens to generate of each.
        seed: Of the weights and the prompts.
        modes: For each run, whether state is pushed by layers.
        timeout: Seconds that a request, or silence, may take.
        sabotage: Pools to zero in decode's memory, one request each.
    """

    backend: str = "tcp"
    requests: int = 4
    tokens: int = 32
    seed: int = 0
    modes: tuple[bool, ...] = (False, True)
    timeout: float = 120.0
    sabotage: tuple[str, ...] = ()


class Prompt(msgspec.Struct, frozen=True):
    """One request, as prefill and the reference know it."""

    room: int
    prompt: tuple[int, ...]


class Expected(msgspec.Struct, frozen=True):
    """One request, as decode knows it.

    Attributes:
        room: Its id on both sides.
        tokens: Length of its prompt.
        sabotage: Pool to zero once the request has arrived; none if empty.
    """

    room: int
    tokens: int
    sabotage: str = ""


class Serve(msgspec.Struct, frozen=True, tag=True):
    """To prefill: compute these prompts and push their state. To the reference: answer them."""

    requests: tuple[Prompt, ...]
    by_layer: bool = False


class Expect(msgspec.Struct, frozen=True, tag=True):
    """To decode: receive these requests from the prefill at `peer`, and answer them."""

    requests: tuple[Expected, ...]
    peer: str


class Answer(msgspec.Struct, frozen=True):
    """What was generated.

    Attributes:
        first_token: The token that prefill sampled and decode was fed.
        first_logprob: Its log-probability, as prefill saw it.
        logits: Bytes of the logits of decode's first step, in bfloat16.
        tokens: The tokens that were generated.
    """

    first_token: int
    first_logprob: float
    logits: bytes
    tokens: tuple[int, ...]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From all: the model is built. Prefill tells its link's address."""

    address: str = ""


class Solved(msgspec.Struct, frozen=True, tag=True):
    """From the reference: the answer without any transfer."""

    room: int
    answer: Answer


class Sent(msgspec.Struct, frozen=True, tag=True):
    """From prefill: a room has succeeded.

    Attributes:
        room: The room.
        pushed: Per component, when each push that carried some of it was made, on the machine's monotonic clock.
        digests: What prefill's pools held of the request.
    """

    room: int
    pushed: dict[str, list[float]]
    digests: dict[str, str]


class Served(msgspec.Struct, frozen=True, tag=True):
    """From decode: a room has succeeded, and the request is answered.

    Attributes:
        room: The room.
        arrived: When everything was visible, on the machine's monotonic clock.
        moved: Per component, the bytes and blocks.
        digests: What decode's pools held of the request.
        answer: What was generated; None if decode refused the metadata row.
        refused: Why it did.
    """

    room: int
    arrived: float
    moved: dict[str, tuple[int, int]]
    digests: dict[str, str]
    answer: Answer | None = None
    refused: str = ""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From prefill and decode: a room has failed."""

    room: int
    why: str


class Finished(msgspec.Struct, frozen=True, tag=True):
    """From prefill and decode: all requests have ended, and their memory is released."""


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """From all: the worker ends, for a reason that the user can do something about."""

    why: str


Event = Ready | Solved | Sent | Served | Failed | Finished | Stopped
