"""A request that alone decides about its room takes a short way. It leads where the general way leads."""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from statelink.errors import MismatchError
from statelink.link.prefill._claims import Claims
from statelink.link.prefill._outgoing import OutgoingDelivery

from .explore import CALM, HARSH, WILD, act, hurry
from .network import SimChannel
from .shape import Shape
from .world import World, running

if TYPE_CHECKING:
    from statelink.link.prefill._decode_ranks import DecodeRank
    from statelink.wire import Message, Request

SEEDS, STEPS = 12, 2500
REFUSED = 5
"""Of so many requests that would meet their room, one does not fit it."""

Said = tuple[str, str, str, int, object]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def play(seed: int) -> None:
    """A world with one decode rank, in which ids are used again and rooms are given up early, and nothing is killed."""
    rng = random.Random(seed)
    shape = Shape(1, 1, rng.random() < 0.5, reuse="counted")
    world = World(shape, rng, rng.choice([CALM, HARSH, WILD]))
    for _ in range(STEPS):
        act(world, rng, False)
        hurry(world, rng)
        world.step()


def history(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[Said]:
    """Every message of a world, in order: its kind, from whom, to whom, about which room, and for what reason."""
    sent: list[Said] = []
    send, of, numbers = SimChannel.send, OutgoingDelivery.of, itertools.count()

    def noting(channel: SimChannel, message: Message, address: str | None = None) -> bool:
        reason = getattr(message, "reason", None)
        why = None if reason is None else (reason.code, reason.what, reason.cause, reason.diagnostics)
        kind, room = type(message).__name__, getattr(message, "room", 0)
        sent.append((kind, message.sender[:9], message.to[:9], room, str(why)))
        return send(channel, message, address)

    def refusing(*given: Any) -> OutgoingDelivery:
        if next(numbers) % REFUSED == REFUSED - 1:
            raise MismatchError("the two sides disagree", cause="this test wants it", code="room.tokens")
        return of(*given)

    with monkeypatch.context() as patch, running():
        patch.setattr(SimChannel, "send", noting)
        patch.setattr(OutgoingDelivery, "of", refusing)
        play(seed)
    return sent


def test_a_sole_request_meets_its_room_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a world of chances, each message depends on all before it: one that differs would change all after it."""
    sole = Claims.sole
    counts: Counter[str] = Counter()

    def counting(claims: Claims, request: Request, rank: DecodeRank) -> bool:
        found = sole(claims, request, rank)
        remembered = not claims._tombstones.blank(request.room)
        counts["sole" if found else "only remembered" if remembered and not request.unmet else "other"] += 1
        return found

    for seed in range(SEEDS):
        monkeypatch.setattr(Claims, "sole", counting)
        short = history(seed, monkeypatch)
        monkeypatch.setattr(Claims, "sole", lambda claims, request, rank: False)
        assert history(seed, monkeypatch) == short, f"seed {seed}"
        counts["refused"] += sum("this test wants it" in str(each[-1]) for each in short)
    assert counts["sole"] > 100, counts
    assert min(counts["only remembered"], counts["refused"]) > 10, counts
