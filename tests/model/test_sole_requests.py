"""A request that alone decides about its room takes a short way. It leads where the general way leads."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from statelink.link.prefill._claims import Claims

from .explore import run
from .network import SimChannel
from .world import running

if TYPE_CHECKING:
    from statelink.link.prefill._decode_rank import DecodeRank
    from statelink.wire import Message, Request

SEEDS = 14
STEPS = 1000


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def history(seed: int, reuse: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str, object]]:
    """Every message of a world, in order: its kind, from whom and to whom, and about which room."""
    sent: list[tuple[str, str, str, object]] = []
    send = SimChannel.send

    def noting(channel: SimChannel, message: Message, address: str | None) -> None:
        reason = getattr(message, "reason", None)
        about = getattr(message, "room", 0), None if reason is None else (reason.code, reason.what, reason.cause)
        sent.append((type(message).__name__, message.sender[:9], message.to[:9], about))
        send(channel, message, address)

    with monkeypatch.context() as patch, running():
        patch.setattr(SimChannel, "send", noting)
        run(seed, STEPS, reuse=reuse)
    return sent


@pytest.mark.parametrize("reuse", ["", "counted"])
def test_a_sole_request_meets_its_room_as_any_other(reuse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a world of chances, each message depends on all before it: one that differs would change all after it."""
    sole = Claims.sole
    taken = 0

    def counted(claims: Claims, request: Request, rank: DecodeRank) -> bool:
        nonlocal taken
        found = sole(claims, request, rank)
        taken += found
        return found

    for seed in range(SEEDS):
        monkeypatch.setattr(Claims, "sole", counted)
        short = history(seed, reuse, monkeypatch)
        monkeypatch.setattr(Claims, "sole", lambda claims, request, rank: False)
        assert history(seed, reuse, monkeypatch) == short, f"seed {seed}"
    assert taken > 20, "hardly a request took the short way"
