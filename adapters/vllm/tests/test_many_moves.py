"""Many requests that move between two real engines with few blocks, while clients leave and engines die.

Every answer is that of an engine which does nothing else.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from engine_processes import running
from support.crowds import SIDES, Crowd
from support.engines import PREFILL, Engine, Pair, engine_options, prompt_of
from support.families import FAMILIES

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.servers

CONFIG = {"backend": "tcp", "verify": "digest", "heartbeat": 0.5, "liveness": 4.0, "deadline": 20.0}
KEY = "open sesame, open"


class Engines(NamedTuple):
    """What the engines of a model have: blocks for most of what runs, and a version of vLLM's model runner."""

    blocks: int
    runner: int


MODELS = {
    "llama": Engines(24, 2),
    "windowed": Engines(72, 1),
    "hybrid": Engines(30, 1),
    "DeepSeek V3": Engines(48, 1),
}
"""On a CPU, vLLM's blocks of latents have 16 tokens, and all others 32 here."""
MOVES = 60
"""Moves of each model that an engine has gone on from."""
AT_ONCE = 6
DEATHS = ("sender, answered", "sender, asked", "receiver, asked", "sender, runs")
"""Which engine dies: the one that hands over, before another one has asked or right after it, or while all runs there;
or the one that has just got the requests."""


class Stream:
    """A request on its way.

    Attributes:
        name: It has another one on each engine.
        prompt: Its prompt.
        count: How many tokens are wanted.
        tokens: Its prompt, and the tokens that its client has got.
        params: What the last engine said.
    """

    def __init__(self, number: int, chance: random.Random) -> None:
        self._number, self._engines = number, 0
        self.prompt = prompt_of(number, chance.randrange(20, 220))
        self.count = chance.randrange(30, 90)
        self.tokens = list(self.prompt)
        self.params: Any = None
        self.next()

    def next(self) -> None:
        """It begins on an engine."""
        self._engines += 1
        self.name = f"stream{self._number}.{self._engines}"

    @property
    def request(self) -> tuple[str, Sequence[int], int, Any]:
        return self.name, self.tokens, self.count + len(self.prompt) - len(self.tokens), self.params


class Streams(Crowd):  # type: ignore[misc]
    """Streams behind a router."""

    def __init__(self, pair: Pair, alone: Engine, seed: int) -> None:
        super().__init__(pair, alone, seed)
        self._numbers = itertools.count()

    def run(self) -> None:
        """Let streams run on one engine, then move, and so on."""
        deaths = iter(DEATHS)
        streams: list[Stream] = []
        for number in itertools.count():
            if self.seen["moves"] >= MOVES:
                break
            here, there = (SIDES[(number + place) % 2] for place in range(2))
            death = next(deaths, "") if number % 2 else ""
            streams = self._round(here, there, streams, death)
            streams += [self._new(there) for _ in range(AT_ONCE - len(streams))]
        for name in SIDES:
            self.count(name)

    def _new(self, where: str) -> Stream:
        """A stream that begins. The other engine has computed the prompts of some."""
        made = Stream(next(self._numbers), self.chance)
        self.alone.add(made.name, made.prompt, made.count)
        if self.chance.random() < 0.5:
            other = SIDES[where == SIDES[0]]
            made.params = self.engine(other).run(f"{made.name}p", made.prompt, 1, dict(PREFILL)).params
        return made

    def _round(self, here: str, there: str, streams: list[Stream], death: str) -> list[Stream]:
        """Streams run on an engine, until they move. Returns those that did."""
        engine = self.engine(here)
        begun = [each for each in streams if each.params and each.params.get("moves")]
        engine.add_all([each.request for each in streams])
        if death == "receiver, asked":
            engine = self._dies(here, death, streams)
        elif death == "sender, asked":
            self._dies(there, death, [])
        gone = self.leave(here, [each.name for each in streams])
        streams = [each for each in streams if each.name not in gone]
        if streams:
            first = self.chance.choice(streams)
            engine.wait_length(first.name, len(first.tokens) + self.chance.randrange(1, 9))
        if death == "sender, runs":
            engine = self._dies(here, death, streams)
        which = [each.name for each in streams if self.chance.random() < 0.8]
        if which:
            engine.move(KEY, *which)
        moved = []
        for each in streams:
            ended = engine.result(each.name)
            assert ended.why == "length"
            self.seen["moves"] += each in begun
            self.seen["received"] += ended.loaded is not None
            each.tokens += ended.tokens
            each.params = ended.params
            alone = self.alone.result(f"{each.name.partition('.')[0]}.1").tokens
            assert each.tokens[len(each.prompt) :] == alone[: len(each.tokens) - len(each.prompt)], each.name
            if each.params and each.params.get("moves"):
                moved.append(each)
            else:
                assert len(each.tokens) == len(each.prompt) + each.count
                self.seen["ended"] += 1
        if death == "sender, answered":
            self._dies(here, death, [])
        left = [each for each in moved if self.chance.random() < 0.06]
        self.seen["nobody comes"] += len(left)
        for each in moved:
            each.next()
        return [each for each in moved if each not in left]

    def _dies(self, side: str, death: str, streams: Sequence[Stream]) -> Engine:
        """An engine dies, and another one is in its place. The router gives that one the streams that it had."""
        made = self.replace(side)
        self.seen[death] += 1
        for each in streams:
            each.next()
        made.add_all([each.request for each in streams])
        return made


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.shows("moves many running requests with few blocks, while clients leave and engines die: {name}")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_every_answer_is_that_of_one_engine(
    name: str, request: pytest.FixtureRequest, models: Path, tmp_path: Path
) -> None:
    model = FAMILIES[name](models / "moving-latents") if name in FAMILIES else request.getfixturevalue(name)
    key = tmp_path / "key"
    key.write_text(KEY)
    both: Any = {"kv_role": "kv_both", "more": {"vllm": {"move_key_file": str(key)}}}
    blocks, runner = MODELS[name]
    common: Any = {"max_model_len": 512, "enable_prefix_caching": False}
    few = {**common, "num_gpu_blocks_override": blocks}
    alone = Engine("alone", tmp_path, engine_options(model, **common), runner=runner)
    try:
        with running(Pair(tmp_path, model, CONFIG, prefill=both, decode=both, runner=runner, **few)) as pair:
            alone.wait_ready()
            many = Streams(pair, alone, len(name))
            many.run()
            print(dict(many.seen))
            pair.settled()
    finally:
        alone.kill()
    assert set(DEATHS) <= set(many.seen)
    assert many.seen["received"] > MOVES // 2
    assert any(many.seen[f"{side} preempted"] for side in SIDES)
