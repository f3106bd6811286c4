"""Every pair of flags on every role, for each kind of layers, in a chain of three servers: the second is looked at.

Its tokens, and those of the server behind it, are those of one server. The role and the kind of layers decide what
moves, and never what a client gets.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from support.engines import PREFILL
from support.simulated_engine import Side, SimulatedEngine, tokens_of
from support.simulated_pair import STREAMS, SimulatedPair

from statelink import Status

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.smoke

PROMPT = STREAMS[0][:20]
KINDS = [("full",), ("window", "full"), ("chunk", "full"), ("recurrent", "full"), ("full", "window", "recurrent")]
FLAGS = list(itertools.product([False, True], repeat=2))
"""``do_remote_prefill`` and ``do_remote_decode``."""


def chain_of(model: Path, kinds: tuple[str, ...], role: str) -> SimulatedPair:
    """Prefill, the server that is looked at, and decode."""
    return SimulatedPair(model, [Side(kinds, 4, 90, role=each) for each in ("kv_producer", role, "kv_consumer")])


def answer(chain: SimulatedPair, engine: SimulatedEngine, name: str) -> dict[str, Any]:
    """What a router gets from an engine, while everything arrives that was sent."""
    for _ in range(60):
        if name in engine.ended:
            return engine.ended[name].params or {}
        for each in chain.engines:
            each.step()
        while honest := [happen for kind, happen in chain.network.events(kind=True) if kind in ("write", "arrive")]:
            honest[0]()
    raise AssertionError(f"{name} has not ended")


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.shows("every pair of flags on every role: the tokens of one server")
def test_the_tokens_are_those_of_one_server(
    configuration: Path, kinds: tuple[str, ...], role: str, flags: tuple[bool, bool], count: int
) -> None:
    chain = chain_of(configuration, kinds, role)
    first, server, last = chain.engines
    given: dict[str, Any] = {}
    if flags[0]:
        first.add("first", PROMPT, 1, PREFILL)
        given = answer(chain, first, "first")
    server.add("server", PROMPT, count, {**given, "do_remote_prefill": flags[0], "do_remote_decode": flags[1]})
    said = answer(chain, server, "server")
    # If the server has generated an answer, what follows is the next turn: it begins with the prompt and this answer.
    prompt = PROMPT if count == 1 else [*PROMPT, *tokens_of(PROMPT, count), 5]
    last.add("last", prompt, 4, said)
    chain.settle()

    whole = kinds == ("full",)
    receives = flags[0] and role != "kv_producer"
    sends = flags[1] and role != "kv_consumer" and (whole or count > 1 or not receives)
    moved = [room.link.engine for room in chain.network.rooms["receive"] if room.status is Status.SUCCEEDED]
    assert moved == [engine for engine, moves in ((server, receives), (last, sends)) if moves]
    assert ("refused" in said) == (flags[1] and not sends)
    assert last.ended["last"].tokens == tokens_of(prompt, 4)
    if (
        whole or not sends or count > 1
    ):  # otherwise the answer has the token behind a shorter prompt, which a router drops
        assert server.ended["server"].tokens == tokens_of(PROMPT, count)


def test_all_answers_to_a_prompt_say_that_nothing_is_sent_on(configuration: Path) -> None:
    """The first receives, and the others compute the prompt. vLLM answers with what the last of them says."""
    chain = chain_of(configuration, ("recurrent", "full"), "kv_both")
    first, server, _ = chain.engines
    first.add("first", PROMPT, 1, PREFILL)
    said = {**answer(chain, first, "first"), "do_remote_decode": True}
    names = [f"{number}_cmpl-a-0-0123abcd" for number in range(3)]
    for name in names:
        server.add(name, PROMPT, 1, said)
    for name in names:
        assert "'do_remote_prefill', too" in answer(chain, server, name)["refused"]
    chain.settle()
    assert [server.ended[name].tokens for name in names] == [tokens_of(PROMPT, 1)] * 3


@pytest.mark.parametrize(
    ("kinds", "leaves", "why"),
    [(("full",), True, "FINISHED_ABORTED"), (("recurrent", "full"), False, "it asks for 4 tokens")],
)
def test_decode_that_may_wait_already_hears_that_nothing_is_sent_on(
    configuration: Path, kinds: tuple[str, ...], leaves: bool, why: str
) -> None:
    """With an id of the router's, its room ends while the other server still receives, and not at the deadline."""
    chain = chain_of(configuration, kinds, "kv_both")
    first, server, _ = chain.engines
    first.add("first", PROMPT, 1, PREFILL)
    said = {**answer(chain, first, "first"), "do_remote_decode": True, "transfer_id": "xfer-7"}
    server.add("server", PROMPT, 4, said)
    server.step()
    if leaves:
        server.abort("server")
        server.step()
    (room,) = [each for each in chain.network.rooms["send"] if each.link.engine is server]
    assert why in room.given_up
    chain.settle()
