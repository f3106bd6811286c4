"""Many conversations over two real engines with few blocks, while clients leave, histories change, and engines die.

Every answer is that of an engine which does nothing else.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from engine_processes import running
from support.crowds import SIDES, Crowd
from support.engines import PREFILL, Engine, Pair, engine_options, prompt_of
from support.families import FAMILIES

if TYPE_CHECKING:
    import random
    from pathlib import Path

pytestmark = pytest.mark.servers

CONFIG = {"backend": "tcp", "verify": "digest", "heartbeat": 0.5, "liveness": 4.0, "deadline": 20.0}
BLOCKS = {"llama": 90, "windowed": 180, "hybrid": 180, "DeepSeek V3": 180}
"""By the name of a model. Turns that run find enough, and most of those that are held have to go. On a CPU,
vLLM's blocks of latents have 16 tokens, and all others 32 here."""
CONVERSATIONS = 52
UNDER_WAY = 14
"""Conversations that are under way."""
AT_ONCE = 6
"""Turns that run at the same time. The other conversations wait for their clients."""
HOLD_SECONDS = 25.0
MOMENTS = "between turns", "answered", "busy"
"""When an engine dies: while both only hold turns, when prefill has answered, or when it has just got all requests."""


GIVEN_UP = re.compile("such requests held|another request lacked")
"""Why held turns are given up, in the log."""
HAPPENS = "left prefill", "left decode", "reasoning left out", "another end", "mixed up"
"""What also happens to conversations, by chance."""


class Talk:
    """A conversation.

    Attributes:
        history: The prompt of its next turn.
        back: What decode said at the end of the last one, if the router has it.
        left: Turns that are left.
    """

    def __init__(self, number: int, chance: random.Random) -> None:
        self._chance = chance
        self.history = prompt_of(number, chance.randrange(20, 220))
        self.back: Any = None
        self.left = chance.randrange(3, 6)

    def answered(self, tokens: list[int]) -> list[str]:
        """A turn has ended, and the client says something. Returns what the template changes of the answer."""
        self.left -= 1
        changed = []
        if self._chance.random() < 0.15:
            tokens = tokens[len(tokens) // 2 :]
            changed.append("reasoning left out")
        if self._chance.random() < 0.15:
            tokens = [*tokens[:-1], 5, 6]
            changed.append("another end")
        added = self._chance.choices(range(4, 500), k=self._chance.randrange(1, 60))
        self.history = [*self.history, *tokens, *added]
        return changed


class Talks(Crowd):  # type: ignore[misc]
    """Conversations behind a router."""

    _death: Any = None
    """Which engine dies in the turns that run, and when."""

    def run(self, count: int) -> None:
        """Have so many conversations."""
        deaths = itertools.product(MOMENTS, SIDES)
        coming = [Talk(number, self.chance) for number in range(count)]
        under_way: list[Talk] = []
        for number in itertools.count():
            while coming and len(under_way) < UNDER_WAY:
                under_way.append(coming.pop())
            if not under_way:
                return
            self._death = next(deaths, None) if number % 5 == 4 else None
            self._turns(number, under_way[:AT_ONCE])
            under_way = [talk for talk in (*under_way[AT_ONCE:], *under_way[:AT_ONCE]) if talk.left]

    def _turns(self, number: int, talks: Sequence[Talk]) -> None:
        """One turn of each, at the same time."""
        named = {f"turn{number}.{place}": talk for place, talk in enumerate(talks)}
        counts = {name: self.chance.randrange(1, 40) for name in named}
        self.alone.add_all([(name, talk.history, counts[name], None) for name, talk in named.items()])
        self._dies("between turns", *SIDES)
        asks = self._asks(named)
        self.pair.prefill.add_all([(name, talk.history, 1, asks[name]) for name, talk in named.items()])
        if self._dies("busy", "prefill"):
            return
        named = self._stay("prefill", named)
        said = {name: self.pair.prefill.result(name).params or {} for name in named}
        self._dies("answered", *SIDES)
        held = [name for name in named if self.chance.random() < 0.7]
        for name in held:
            said[name] = {**said[name], "do_remote_decode": True, "hold": HOLD_SECONDS}
        self.pair.decode.add_all([(name, talk.history, counts[name], said[name]) for name, talk in named.items()])
        if self._dies("busy", "decode"):
            return
        for name, talk in self._stay("decode", named).items():
            ended = self.pair.decode.result(name)
            assert (ended.why, ended.tokens) == ("length", self.alone.result(name).tokens), f"{name}: {asks[name]}"
            talk.back = ended.params if name in held else None
            self.seen.update(["turn", *talk.answered(ended.tokens)])

    def _asks(self, named: Mapping[str, Talk]) -> dict[str, Any]:
        """What the router says to prefill of each turn. It asks decode for some of those of which it has nothing."""
        asked = [name for name, talk in named.items() if not talk.back and self.chance.random() < 0.8]
        ask = {**PREFILL, "cached": True}
        self.pair.decode.add_all([(f"{name}asked", named[name].history, 1, ask) for name in asked])
        backs = {name: talk.back for name, talk in named.items()}
        backs |= {name: self.pair.decode.result(f"{name}asked").params for name in asked}
        made: dict[str, Any] = {}
        for name, back in backs.items():
            if self.chance.random() < 0.05:
                self.seen["mixed up"] += 1
                back = self.chance.choice(list(backs.values()))
            usable = bool(back) and "tokens" in back
            made[name] = {**back, "do_remote_prefill": True, "do_remote_decode": True} if usable else dict(PREFILL)
        return made

    def _stay(self, side: str, named: Mapping[str, Talk]) -> dict[str, Talk]:
        """Some clients leave. Returns the other turns."""
        gone = self.leave(side, named)
        return {name: talk for name, talk in named.items() if name not in gone}

    def _dies(self, moment: str, *sides: str) -> bool:
        """Whether an engine dies, if one of these is to die at this moment. Another one is then in its place."""
        if self._death not in [(moment, side) for side in sides]:
            return False
        side = self._death[1]
        self.replace(side)
        self.seen[f"{side} died, {moment}"] += 1
        return True


@contextmanager
def crowd(name: str, model: Path, folder: Path) -> Iterator[tuple[Pair, Talks]]:
    both: Any = {"kv_role": "kv_both"}
    few = {"num_gpu_blocks_override": BLOCKS[name], "enable_prefix_caching": True}
    alone = Engine("alone", folder, engine_options(model, enable_prefix_caching=False), runner=1)
    try:
        with running(Pair(folder, model, CONFIG, prefill=both, decode=both, runner=1, **few)) as pair:
            alone.wait_ready()
            yield pair, Talks(pair, alone, len(name))
    finally:
        alone.kill()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.shows("conversations: many at once with few blocks, while clients leave and engines die: {name}")
@pytest.mark.shows("no block of vLLM's pool is lost")
def test_every_answer_is_that_of_one_engine(
    name: str, request: pytest.FixtureRequest, models: Path, tmp_path: Path
) -> None:
    model = FAMILIES[name](models / "latents") if name in FAMILIES else request.getfixturevalue(name)
    with crowd(name, model, tmp_path) as (pair, many):
        many.run(CONVERSATIONS)
        for side in SIDES:
            many.count(side)
        print(f"soak: {name}: {dict(many.seen)}")
        pair.settled()
        happened = {*map(" died, ".join, itertools.product(SIDES, MOMENTS)), *HAPPENS}
        assert not [what for what in happened if not many.seen[what]]
        assert many.seen["prefill received"] > CONVERSATIONS / 2
        assert GIVEN_UP.search(pair.decode.logged())
