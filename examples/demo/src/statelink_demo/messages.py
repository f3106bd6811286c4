"""What the demo's processes say to one another over their pipes: one JSON object a line.

The parent sends commands, its workers answer with events. Only prefill and the reference are told prompts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from statelink_demo.forward import Generation

__all__ = [
    "Answered",
    "Arrived",
    "Command",
    "Computed",
    "Count",
    "Event",
    "Expect",
    "Expected",
    "Failed",
    "Finished",
    "Opened",
    "Prompt",
    "Ready",
    "Refused",
    "Sent",
    "Serve",
    "Solve",
    "Start",
    "Stopped",
    "answered",
]


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


class Count(msgspec.Struct, frozen=True):
    """How much of one component moved."""

    nbytes: int
    blocks: int


class Start(msgspec.Struct, frozen=True, tag=True):
    """To all, first: build the model, and on prefill and decode open the link.

    Attributes:
        seed: Of the model's weights.
        backend: Name of the backend.
        chunk_tokens: Tokens per forward pass of prefill.
        deadline: Seconds that one request may take.
    """

    seed: int
    backend: str
    chunk_tokens: int
    deadline: float


class Solve(msgspec.Struct, frozen=True, tag=True):
    """To the reference: answer these prompts in one process."""

    requests: tuple[Prompt, ...]
    count: int


class Expect(msgspec.Struct, frozen=True, tag=True):
    """To decode: open these rooms with the prefill at `peer`, and generate `count` tokens of each."""

    requests: tuple[Expected, ...]
    peer: str
    count: int


class Serve(msgspec.Struct, frozen=True, tag=True):
    """To prefill: compute these prompts and push their state, by layers or by chunks."""

    requests: tuple[Prompt, ...]
    by_layer: bool


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From all: the model is built. Prefill and decode tell their link's address."""

    address: str = ""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """From decode: every room of the command is open."""


class Computed(msgspec.Struct, frozen=True, tag=True):
    """From prefill: one more chunk is computed and pushed."""

    room: int


class Sent(msgspec.Struct, frozen=True, tag=True):
    """From prefill: a room has succeeded.

    Attributes:
        room: The room.
        pushes: Per component, how many pushes carried some of it.
        pushed: Per component, when its last push was made, on the machine's monotonic clock.
        fingerprints: What prefill's pools held of the request.
    """

    room: int
    pushes: dict[str, int]
    pushed: dict[str, float]
    fingerprints: dict[str, str]


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """From decode: a room has succeeded, at `at` on the machine's monotonic clock."""

    room: int
    at: float
    moved: dict[str, Count]


class Answered(msgspec.Struct, frozen=True, tag=True):
    """From decode and the reference: what was generated.

    Attributes:
        room: The request.
        first_token: The token that prefill sampled.
        first_logprob: Its log-probability.
        logits: Bytes of the first step's logits, in bfloat16.
        tokens: The tokens that were generated.
        fingerprints: What decode's pools held of the request; empty from the reference.
    """

    room: int
    first_token: int
    first_logprob: float
    logits: bytes
    tokens: tuple[int, ...]
    fingerprints: dict[str, str] = {}


class Refused(msgspec.Struct, frozen=True, tag=True):
    """From decode: a room has succeeded, but its metadata row contradicts it."""

    room: int
    why: str
    fingerprints: dict[str, str]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From prefill and decode: a room has failed."""

    room: int
    why: str


class Finished(msgspec.Struct, frozen=True, tag=True):
    """From prefill and decode: the command is done, and all of its memory released."""


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """From all: the worker ends, for a reason that the user can do something about."""

    why: str


Command = Start | Solve | Expect | Serve
Event = Ready | Opened | Computed | Sent | Arrived | Answered | Refused | Failed | Finished | Stopped


def answered(room: int, found: Generation, fingerprints: Mapping[str, str] | None = None) -> Answered:
    """Put what was generated into a message."""
    return Answered(
        room=room,
        first_token=found.first_token,
        first_logprob=found.first_logprob,
        logits=found.logits_bytes(),
        tokens=found.tokens,
        fingerprints=dict(fingerprints or {}),
    )
