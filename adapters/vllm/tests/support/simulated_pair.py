"""A prefill and a decode engine without models, and the router, clients and events that act on them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .engines import PREFILL
from .simulated_engine import LONGEST, Ended, Side, SimulatedEngine, tokens_of
from .simulated_link import Network

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Act", "Request", "SimulatedPair"]

COUNT = 4
"""Tokens that decode adds to a prompt."""

STREAMS = [[7 * n % 61 for n in range(LONGEST)], [7 * n % 61 + (n >= 12) for n in range(LONGEST)]]
"""Prompts are beginnings of these. The two have their first twelve tokens in common."""

Act = tuple[str, int]
"""One thing that happens: what, and a number that chooses among what it can happen to."""

FAILING = ("fail", "fail quietly", "give up")


class Request(NamedTuple):
    """A request of a client: the engine that computes its prompt, and the one that goes on."""

    name: str
    prompt: list[int]
    source: SimulatedEngine
    target: SimulatedEngine


class SimulatedPair:
    """Engines that hand requests to each other: two, and a third behind them if a test asks for it.

    Args:
        model: The folder with the configuration of any model.
        sides: What they are like.
        at_once: Whether the router sends a request to both engines at once, and not to one after the other.
    """

    def __init__(self, model: Path, sides: Sequence[Side], *, at_once: bool = False) -> None:
        self.network, self.at_once = Network(), at_once
        names = ("one", "other", "third")
        self.engines = [
            SimulatedEngine(name, model, side, self.network) for name, side in zip(names, sides, strict=False)
        ]
        if len(self.engines) == 2:
            for here, there in (self.engines, self.engines[::-1]):
                here.between = functools.partial(self._meanwhile, there)
        self.rough = False
        """Whether rooms may fail in the middle of a step, too."""
        self._turns = 0
        self._inside = False
        self.requests: dict[str, Request] = {}
        self._routed: set[str] = set()
        self._aborted: set[str] = set()

    def _meanwhile(self, other: SimulatedEngine) -> None:
        """While a forward pass runs on one engine, the other one takes steps, and state arrives."""
        self._turns += 1
        if self._inside or self._turns % 3:
            return
        self._inside = True
        if self._turns % 2:
            other.step()
        rough = self.rough and self._turns % 35 == 0
        events = [happen for kind, happen in self.network.events(kind=not rough) if rough or kind not in FAILING]
        if events and self._turns % 4:
            events[self._turns % len(events)]()
        self._inside = False

    # What can happen.

    def act(self, act: Act) -> None:
        """Let one thing happen."""
        what, number = act
        if what == "request":
            length = 1 + number // 2 % (LONGEST - COUNT - 1)
            self.request(number % 2, length, backwards=number % 5 == 0, priority=number % 3)
        elif what == "abort":
            if self.requests:
                self.abort(list(self.requests)[number // 2 % len(self.requests)], number % 2)
        elif what == "event":
            events = self.network.events()
            if events:
                events[number % len(events)][1]()
        else:
            if what == "reset":
                self.engines[number % 2].reset(everything=number // 2 % 2 == 0)
            else:
                getattr(self.engines[number % 2], what)()
            self.route()

    def request(self, stream: int, length: int, *, backwards: bool = False, priority: int = 0) -> str:
        """A client's request. Where both engines have both roles, it may go backwards."""
        backwards = backwards and self.engines[1].side.role == "kv_both"
        source, target = self.engines[:: -1 if backwards else 1]
        name = f"r{len(self.requests)}"
        made = Request(name, STREAMS[stream][:length], source, target)
        self.requests[name] = made
        if self.at_once:
            said = {"transfer_id": name, "remote_engine_id": source.name}
            source.add(name, made.prompt, 1, {**PREFILL, **said}, priority)
            target.add(name, made.prompt, COUNT, {"do_remote_prefill": True, **said}, priority)
            self._routed.add(name)
        else:
            source.add(name, made.prompt, 1, PREFILL)
        return name

    def route(self) -> None:
        """A serial router hands on what prefill answered."""
        for name, each in self.requests.items():
            if name not in self._routed and name in each.source.ended:
                self._routed.add(name)
                if name not in self._aborted:
                    each.target.add(name, each.prompt, COUNT, each.source.ended[name].params)

    def abort(self, name: str, side: int) -> None:
        """A client leaves; its request is aborted where it is."""
        self._aborted.add(name)
        self.engines[side].abort(name)

    # The end.

    def settle(self) -> None:
        """Let everything end well that can, and check that every request ended as it had to, and nothing is left."""
        for _ in range(4000):
            if not self._go_on():
                break
        else:
            waiting = {engine.name: list(engine.scheduler.requests) for engine in self.engines}
            raise AssertionError(f"the engines do not come to an end: {waiting}")
        for engine in self.engines:
            engine.check_settled()
        for name, each in self.requests.items():
            if name not in self._aborted:
                self._check(name, each)

    def _go_on(self) -> bool:
        """Whether there is anything left to do."""
        before = len(self.network.events(kind=True))
        for kind, happen in self.network.events(kind=True):
            if kind not in FAILING:
                happen()
                return True
        for engine in self.engines:
            for _ in range(3):
                engine.step()
                self.route()
        after = self.network.events(kind=True)
        if len(after) == before and all(kind in FAILING for kind, _ in after):
            for _, happen in after:
                happen()
        return bool(after) or any(engine.busy for engine in self.engines)

    def _check(self, name: str, each: Request) -> None:
        ended: Ended = each.target.ended[name]
        if ended.why == "error":
            assert each.target.side.policy == "fail", f"{name} failed"
            return
        assert ended.tokens == tokens_of(each.prompt, COUNT), f"{name} has got the tokens of another prompt"

    def play(self, acts: Sequence[Act]) -> None:
        """Let these happen, one after the other, and then everything end."""
        for act in acts:
            self.act(act)
        self.settle()


def pair_of(
    model: Path, kinds: tuple[str, ...], blocks: tuple[int, int], spare: tuple[int, int], **more: Any
) -> SimulatedPair:
    """Two engines with room for one request of the largest size and a few blocks more.

    Args:
        model: The folder with the configuration of any model.
        kinds: Groups of layers.
        blocks: Tokens of a block on each side.
        spare: Blocks that each side has beyond those of one request.
        more: ``ranks``, ``ahead`` and ``policy`` as in `Side`, and ``at_once``.
    """
    at_once, ranks = more.pop("at_once", False), more.pop("ranks", (1, 1))
    sides = [
        Side(kinds, block, 1 + len(kinds) * -(-LONGEST // block) + left, rank, known=at_once, **more)
        for block, left, rank in zip(blocks, spare, ranks, strict=True)
    ]
    return SimulatedPair(model, sides, at_once=at_once)
