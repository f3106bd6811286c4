"""Requests that move to another server while they run, and what stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pages import objects
from support.newest import OLDER
from support.simulated_engine import Side, SimulatedEngine, tokens_of
from support.simulated_pair import SimulatedPair
from vllm.triton_utils import HAS_TRITON

from statelink import Status
from statelink_vllm.connector import Receive, ToWorker

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.smoke

KINDS = [("full",), ("window", "full"), ("chunk", "full"), ("recurrent", "full"), ("full", "window", "recurrent")]
KEY = "0123456789abcdef"
PROMPT = [7 * n % 61 for n in range(10)]


class Fleet:
    """Three engines, of which each has the key."""

    def __init__(self, model: Path, key: Path, kinds: tuple[str, ...] = ("full",), **more: Any) -> None:
        key.write_text(KEY)
        self.pair = SimulatedPair(model, [Side(kinds, 4, 90, own={"move_key_file": str(key)}, **more)] * 3)
        self.one, self.other, self.third = self.pair.engines

    def run(self, steps: int = 1) -> None:
        """Steps of all engines, while everything arrives that was sent."""
        for _ in range(steps):
            for each in self.pair.engines:
                each.step()
            events = self.pair.network.events(kind=True)
            while honest := [happen for kind, happen in events if kind not in ("fail", "give up")]:
                honest[0]()
                events = self.pair.network.events(kind=True)

    def end(self, engine: SimulatedEngine, name: str) -> tuple[list[int], dict[str, Any]]:
        """The tokens and the parameters of an answer."""
        for _ in range(60):
            if name in engine.ended:
                return engine.ended[name].tokens, engine.ended[name].params or {}
            self.run()
        raise AssertionError(f"{name} has not ended")

    def move(self, engine: SimulatedEngine, which: Any = True, key: str = KEY) -> dict[str, Any]:
        """Ask for a move."""
        engine.add("control", [5], 1, {"move": which, "key": key})
        said = self.end(engine, "control")[1]
        del engine.ended["control"]
        return said

    def received(self, engine: SimulatedEngine) -> list[int]:
        """For how many tokens state has come to an engine."""
        rooms = self.pair.network.rooms["receive"]
        return [room.tokens for room in rooms if room.link.engine is engine and room.status is Status.SUCCEEDED]


@pytest.fixture
def second_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines with vLLM's second model runner."""
    if OLDER and not HAS_TRITON:
        pytest.skip("this vLLM takes no configuration of its second model runner without Triton, which a CPU lacks")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return tmp_path / "key"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_a_request_that_moves_twice_has_the_tokens_of_one_that_stayed(
    configuration: Path, key: Path, kinds: tuple[str, ...], steps: int, *, ahead: bool
) -> None:
    fleet = Fleet(configuration, key, kinds, ahead=ahead)
    tokens, params, wanted = list(PROMPT), None, tokens_of(PROMPT, 20)
    for number, engine in enumerate((fleet.one, fleet.other, fleet.third)):
        name = f"cmpl-r{number}-0-1234abcd"
        engine.add(name, tokens, 20 - len(tokens) + len(PROMPT), params)
        fleet.run(steps)
        if number < 2:
            said = fleet.move(engine, [f"cmpl-r{number}"])
            assert said == {"moved": [name], "stay": {}}
        more, params = fleet.end(engine, name)
        if number:
            assert fleet.received(engine) == [len(tokens) - 1]
        tokens += more
        assert bool(params.get("moves")) == (number < 2)
        if number < 2:
            assert 0 < params["generated"] < 20
    assert tokens[len(PROMPT) :] == wanted
    fleet.pair.settle()


def test_the_request_of_the_page_moves_all(configuration: Path, key: Path) -> None:
    fleet = Fleet(configuration, key)
    fleet.one.add("r", PROMPT, 20, None)
    fleet.run(3)
    (asked,) = objects("moving.md", r'(?=\{"prompt")')
    params = asked["kv_transfer_params"]
    assert fleet.move(fleet.one, params["move"])["moved"] == ["r"]
    assert set(params) == {"move", "key"}


def test_all_that_runs_moves_and_what_has_just_ended_does_not(configuration: Path, key: Path) -> None:
    fleet = Fleet(configuration, key)
    for name, count in (("long", 20), ("waits", 9), ("ends", 3)):
        fleet.one.add(name, [*PROMPT, len(name)], count, None)
    fleet.run(3)
    said = fleet.move(fleet.one)
    assert set(said["moved"]) == {"long", "waits"}
    for name in ("long", "waits"):
        tokens, params = fleet.end(fleet.one, name)
        history = [*PROMPT, len(name), *tokens]
        fleet.other.add(name, history, 2, params)
        assert fleet.end(fleet.other, name)[0] == tokens_of(history, 2)
    assert fleet.end(fleet.one, "ends")[1] == {}
    fleet.pair.settle()


@pytest.mark.parametrize(
    ("which", "key_given", "why"),
    [
        (True, "0123456789abcdeF", "'key' is not the one"),
        (True, "", "'key' is not the one"),
        (False, KEY, "neither true nor a list"),
        ([], KEY, "neither true nor a list"),
    ],
)
def test_a_move_needs_the_key_and_a_choice(
    configuration: Path, key: Path, which: Any, key_given: str, why: str
) -> None:
    fleet = Fleet(configuration, key)
    fleet.one.add("r", PROMPT, 6, None)
    fleet.run(2)
    assert why in fleet.move(fleet.one, which, key_given)["refused"]
    assert fleet.end(fleet.one, "r") == (tokens_of(PROMPT, 6), {})


def test_nobody_moves_a_request_of_a_server_without_a_key(configuration: Path) -> None:
    pair = SimulatedPair(configuration, [Side(("full",), 4, 90)] * 2)
    engine = pair.engines[0]
    engine.add("control", [5], 1, {"move": True, "key": ""})
    while "control" not in engine.ended:
        engine.step()
    assert "move_key_file" in (engine.ended["control"].params or {})["refused"]


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        ({"stop": ["x"], "detokenize": True}, "a stop string"),
        ({"seed": 1, "temperature": 1.0}, "first model runner"),
        ({"presence_penalty": 0.5}, "first model runner"),
        ({"frequency_penalty": 0.5}, "first model runner"),
    ],
)
def test_what_another_server_would_go_on_with_otherwise_stays(
    configuration: Path, key: Path, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any], why: str
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    fleet = Fleet(configuration, key)
    fleet.one.add("r", PROMPT, 9, None, **sampling)
    fleet.run(2)
    said = fleet.move(fleet.one)
    assert said["moved"] == []
    assert why in said["stay"]["r"]
    assert fleet.end(fleet.one, "r") == (tokens_of(PROMPT, 9), {})


@pytest.mark.usefixtures("second_runner")
def test_the_next_server_takes_what_was_generated_for_generated(configuration: Path, key: Path) -> None:
    """So vLLM's own counts of tokens are those of one server."""
    fleet = Fleet(configuration, key)
    fleet.one.add("r", PROMPT, 9, None, presence_penalty=0.5, min_tokens=8)
    fleet.run(3)
    fleet.move(fleet.one)
    tokens, params = fleet.end(fleet.one, "r")
    assert params["generated"] == len(tokens)
    left = 9 - len(tokens)
    fleet.other.add("r", [*PROMPT, *tokens], left, params, min_tokens=8 - len(tokens))
    request = fleet.other.scheduler.requests["r"]
    assert (request.num_prompt_tokens, request.num_output_tokens, request.max_tokens) == (len(PROMPT), len(tokens), 9)
    assert (request.sampling_params.min_tokens, request.sampling_params.max_tokens) == (8, 9)
    assert [*tokens, *fleet.end(fleet.other, "r")[0]] == tokens_of(PROMPT, 9)
    assert fleet.received(fleet.other) == [len(PROMPT) + len(tokens) - 1]
    fleet.pair.settle()


@pytest.mark.usefixtures("second_runner")
@pytest.mark.parametrize("generated", [0, -1, 10, 99, True, "3", None, 2.0])
def test_a_wrong_number_of_generated_tokens_changes_nothing(configuration: Path, key: Path, generated: Any) -> None:
    fleet = Fleet(configuration, key)
    fleet.one.add("r", PROMPT, 4, {"moves": True, "generated": generated})
    assert fleet.end(fleet.one, "r")[0] == tokens_of(PROMPT, 4)


def test_a_first_runner_says_that_it_counts_what_was_generated_as_a_prompt(
    configuration: Path, key: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server with the second one may have sent the request."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    fleet = Fleet(configuration, key)
    for name, penalty in (("plain", 0.0), ("counts", 0.5)):
        fleet.one.add(name, PROMPT, 2, {"moves": True, "generated": 3}, presence_penalty=penalty)
        assert fleet.end(fleet.one, name)[0] == tokens_of(PROMPT, 2)
        assert ("may get other tokens" in caplog.text) == (name == "counts")


def test_a_client_that_leaves_and_a_receiver_that_does_not_come_hold_nothing(configuration: Path, key: Path) -> None:
    fleet = Fleet(configuration, key)
    for name in ("left", "lost"):
        fleet.one.add(name, [*PROMPT, len(name)], 20, None)
    fleet.run(3)
    fleet.one.add("control", [5], 1, {"move": True, "key": KEY})
    fleet.one.abort("left")
    assert fleet.end(fleet.one, "lost")[1]["moves"]
    for room in fleet.pair.network.rooms["send"]:
        room.fail("nobody came before its deadline")
    fleet.pair.settle()


@pytest.mark.usefixtures("second_runner")
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_a_receiver_need_not_wait_for_state_that_is_gone(
    configuration: Path, key: Path, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]
) -> None:
    """The sender has it, or never will: see `Receive.history`."""
    fleet = Fleet(configuration, key, kinds)
    side = fleet.other.connector.scheduler_side
    step, asked = side.step, list[Receive]()

    def watched(output: Any) -> ToWorker:
        made: ToWorker = step(output)
        asked.extend(made.receive.values())
        return made

    monkeypatch.setattr(side, "step", watched)
    fleet.one.add("r", PROMPT, 20, None)
    fleet.run(4)
    fleet.move(fleet.one)
    tokens, params = fleet.end(fleet.one, "r")
    fleet.other.add("r", [*PROMPT, *tokens], 20 - len(tokens), params)
    assert [*tokens, *fleet.end(fleet.other, "r")[0]] == tokens_of(PROMPT, 20)
    assert [each.history for each in asked] == [True]
    fleet.pair.settle()


def test_a_server_that_ends_hands_all_over_and_holds_no_turn(
    configuration: Path, key: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(configuration, key)
    fleet.one.add("turn", [*PROMPT, 1], 2, {"do_remote_decode": True, "hold": 1000})
    assert fleet.end(fleet.one, "turn")[1]["tokens"]
    fleet.one.add("runs", [*PROMPT, 2], 20, None)
    fleet.run(3)
    fleet.one.connector.scheduler_side.moving.draining = True
    tokens, params = fleet.end(fleet.one, "runs")
    history = [*PROMPT, 2, *tokens]
    fleet.other.add("runs", history, 2, params)
    with caplog.at_level("INFO", "vllm.statelink"):
        assert fleet.end(fleet.other, "runs")[0] == tokens_of(history, 2)
        fleet.pair.settle()
    assert "is drained: 1 requests" in caplog.text
    fleet.one.connector.shutdown()
    assert caplog.text.count("is drained") == 1


def test_a_server_that_ends_while_nothing_runs_says_that_it_is_drained(
    configuration: Path, key: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(configuration, key)
    with caplog.at_level("INFO", "vllm.statelink"):
        fleet.other.connector.shutdown()
        assert "is drained" not in caplog.text
        fleet.one.connector.scheduler_side.moving.draining = True
        fleet.one.connector.shutdown()
    assert "is drained: 0 requests" in caplog.text
