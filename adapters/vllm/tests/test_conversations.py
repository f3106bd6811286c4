"""State in both directions: conversations of several turns, and histories that are not what the state is of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.engines import PREFILL
from support.simulated_engine import Side, SimulatedEngine, tokens_of
from support.simulated_pair import SimulatedPair

from statelink import Status

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.smoke

KINDS = [("full",), ("window", "full"), ("chunk", "full"), ("recurrent", "full"), ("full", "window", "recurrent")]
PROMPT = [7 * n % 61 for n in range(10)]
BOTH = {"do_remote_prefill": True, "do_remote_decode": True}


class Talk:
    """A conversation over a prefill and a decode engine."""

    def __init__(self, model: Path, kinds: tuple[str, ...], **more: Any) -> None:
        self.pair = SimulatedPair(model, [Side(kinds, 4, 90, **more)] * 3)
        self.prefill, self.decode, self.other = self.pair.engines
        self.count = 0

    def ask(self, engine: SimulatedEngine, prompt: list[int], count: int, params: Any) -> tuple[list[int], Any]:
        """The tokens and the parameters of an engine's answer, while everything arrives that was sent."""
        self.count += 1
        name = f"r{self.count}"
        engine.add(name, prompt, count, params)
        for _ in range(60):
            if name in engine.ended:
                return engine.ended[name].tokens, engine.ended[name].params or {}
            for each in self.pair.engines:
                each.step()
            events = self.pair.network.events(kind=True)
            while honest := [happen for kind, happen in events if kind not in ("fail", "give up")]:
                honest[0]()
                events = self.pair.network.events(kind=True)
        raise AssertionError(f"{name} has not ended")

    def turn(self, prompt: list[int], count: int, back: Any = None) -> tuple[list[int], Any]:
        """One turn, with what decode answered in the turn before. Decode holds its state for the next one."""
        _, said = self.ask(self.prefill, prompt, 1, {**(back or {}), **(BOTH if back else PREFILL)})
        tokens, said = self.ask(self.decode, prompt, count, {**said, "do_remote_decode": True, "hold": True})
        assert tokens == tokens_of(prompt, count)
        return [*prompt, *tokens], said

    def received(self, engine: SimulatedEngine) -> list[int]:
        """For how many tokens state has come to an engine, request by request."""
        rooms = self.pair.network.rooms["receive"]
        return [room.tokens for room in rooms if room.link.engine is engine and room.status is Status.SUCCEEDED]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_each_turn_goes_on_from_the_state_of_the_turn_before(
    configuration: Path, kinds: tuple[str, ...], ahead: bool
) -> None:
    """The last token that decode generates is computed in the next turn. An answer may have a single token."""
    talk = Talk(configuration, kinds, ahead=ahead)
    history, back, held = PROMPT, None, []
    for count, more in ((3, [5, 6]), (1, [8]), (6, [9, 9, 9]), (2, [])):
        history, back = talk.turn(history, count, back)
        held.append(len(history) - 1)
        assert back["tokens"] == held[-1]
        history += more
    assert talk.received(talk.prefill) == held[:-1]
    left = int(kinds != ("full",))
    assert talk.received(talk.decode) == [len(PROMPT) - left, 15 - left, 17 - left, 26 - left]
    talk.ask(talk.prefill, history, 1, back | {"do_remote_prefill": True})
    talk.pair.settle()


@pytest.mark.parametrize(
    ("kinds", "kept", "found"),
    [
        (("full",), 15, 14),
        (("full",), 10, 10),  # a template leaves out what was generated
        (("full",), 9, 8),  # it writes the end of a prompt in another way when it is history
        (("full",), 7, 4),
        (("full",), 13, 10),  # it writes the end of what was generated in another way
        (("full",), 3, 0),
        (("recurrent", "full"), 15, 14),
        (("recurrent", "full"), 13, 0),
        (("window", "full"), 15, 14),
        (("window", "full"), 13, 0),
    ],
)
def test_another_history_goes_on_from_its_longest_equal_beginning(
    configuration: Path, kinds: tuple[str, ...], kept: int, found: int
) -> None:
    """Also on a server that has not seen the conversation."""
    talk = Talk(configuration, kinds)
    history, back = talk.turn(PROMPT, 5)
    other = [*history[:kept], *[60, 59, 58, 57, 56]]
    tokens, _ = talk.ask(talk.other, other, 4, {**back, "do_remote_prefill": True})
    assert tokens == tokens_of(other, 4)
    assert talk.received(talk.other) == ([found] if found else [])
