"""Drives a strategy's hooks without a link: which blocks they yield, and how they handle garbage."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from statelink import state
from statelink.config import read_config
from statelink.opening import choose_staging, open_strategies, pick
from statelink.plan import Move, compile_pair, due, expected_move, plan_move, pushed, required, route
from statelink.registry import plugin_manager

from . import _pools

if TYPE_CHECKING:
    from statelink.backend import Blocks, ReceiveHook, SendHook, Strategy
    from statelink.state import Inventory

    from ._bench import Subject

__all__ = ["Driven", "bytes_of", "driven"]

MOST_WAITS = 1000
"""How often a send hook may yield ``None`` while no message comes."""

U64 = npt.NDArray[np.uint64]


class Context:
    """A hook's context. It records the hook's messages."""

    room, generation = 7, 1

    def __init__(self, peer: str, component: str, expected: Move) -> None:
        self.peer = peer
        self.component = component
        self.said: deque[bytes] = deque()
        self._expected = expected

    def message(self, payload: bytes) -> None:
        """See `statelink.backend.HookContext.message`."""
        self.said.append(payload)

    def wake(self) -> None:
        """See `statelink.backend.SendContext.wake`."""

    def expected(self) -> Move:
        """See `statelink.backend.ReceiveContext.expected`."""
        return self._expected

    def grant(self, address: int, nbytes: int, then: Callable[[], None]) -> None:
        """See `statelink.backend.ReceiveContext.grant`."""
        then()


class Driven(NamedTuple):
    """One component between two ranks, and the strategy of each side.

    Attributes:
        component: Its name.
        move: Everything that is due.
        expected: The same move, as the destination knows it.
        ours: Prefill's strategy.
        theirs: Decode's strategy.
    """

    component: str
    move: Move
    expected: Move
    ours: Strategy
    theirs: Strategy

    def hooks(self) -> tuple[SendHook, Context, ReceiveHook, Context]:
        """New hooks for a room, with their contexts."""
        sees = [Context(peer, self.component, self.expected) for peer in ("decode", "prefill")]
        return self.ours.sender(), sees[0], self.theirs.receiver(), sees[1]

    def opened(self, raw: bytes) -> None:
        """Open the send hook with garbage instead of prepared bytes, and take its blocks."""
        send, here, _, _ = self.hooks()
        send.open(here, raw)
        for _ in itertools.islice(send.blocks(here, self.move), 8):
            pass

    def told_prefill(self, raw: bytes) -> None:
        """Send the send hook a garbage message."""
        send, here, receive, there = self.hooks()
        send.open(here, receive.prepare(there))
        send.message(here, raw)

    def told_decode(self, raw: bytes) -> None:
        """Send the receive hook a garbage message."""
        _, _, receive, there = self.hooks()
        receive.prepare(there)
        receive.message(there, raw)

    def handed(self) -> list[Blocks] | None:
        """The blocks that move a request; ``None`` if the strategy does not write in place.

        Raises:
            AssertionError: The send hook waits for something that never comes.
        """
        send, here, receive, there = self.hooks()
        prepared = receive.prepare(there)
        if not receive.in_place:
            return None
        send.open(here, prepared)
        handed, waits = [], 0
        for blocks in send.blocks(here, self.move):
            if blocks is not None:
                handed.append(blocks)
                continue
            waits = 0 if here.said or there.said else waits + 1
            assert waits < MOST_WAITS, (
                f"blocks() waits for what never comes: {send.waits() or 'it does not say for what'}"
            )
            while here.said:
                receive.message(there, here.said.popleft())
            while there.said:
                send.message(here, there.said.popleft())
        return handed


@contextlib.contextmanager
def driven(subject: Subject, labels: list[str], prefill: int, decode: int) -> Iterator[list[Driven]]:
    """Every component between every two ranks that exchange bytes."""
    with contextlib.ExitStack() as opened:
        sides = {}
        for role, width in (("prefill", prefill), ("decode", decode)):
            sides[role] = [_rank(subject, role, rank, width, labels, opened) for rank in range(width)]
        found = []
        inventories = [[inventory for inventory, _, _ in ranks] for ranks in sides.values()]
        for part in route(*inventories):
            (source, ours, here), (target, theirs, there) = sides["prefill"][part.source], sides["decode"][part.target]
            for name, plan in compile_pair(source, target, part).components.items():
                owed = due(plan.source, plan.target, _pools.TOKENS, _pools.PREFIX)
                wanted = required(plan.target, _pools.TOKENS, _pools.PREFIX, there[name])
                given = pushed(plan.source, _pools.TOKENS, _pools.PREFIX, (0, _pools.TOKENS), here[name])
                move, expected = plan_move(plan, given, wanted, owed), expected_move(plan, wanted, owed)
                found.append(Driven(name, move, expected, ours[name], theirs[name]))
        yield found


def _rank(
    subject: Subject, role: str, rank: int, width: int, labels: list[str], opened: contextlib.ExitStack
) -> tuple[Inventory, Mapping[str, Strategy], Mapping[str, Any]]:
    """A rank's inventory, the strategy of each component, and the request's items."""
    held = _pools.make(role, rank, width, labels, _pools.Stock())
    inventory = state.describe(role, [each.described for each in held.values()], rank=rank, ranks=width)
    given = read_config({"role": role, "backend": subject.name, "options": dict(subject.options), **subject.config})
    picked = pick(given, inventory, plugin_manager())
    strategies = choose_staging(picked.strategies, picked.kind, given.config.staging, role)
    opened.callback(held.clear)  # these own the memory
    items = {each.described.component.name: each.ids for each in held.values()}
    return open_strategies(strategies, inventory, opened), strategies, items


def bytes_of(blocks: Sequence[Blocks]) -> npt.NDArray[np.uint64]:
    """Every byte that blocks move: rows of target address, source address and both regions, sorted by target."""
    if not blocks:
        return np.empty((0, 4), np.uint64)
    columns = []
    for part in blocks:
        within = np.concatenate(
            [np.arange(nbytes, dtype=np.uint64) for nbytes in part.nbytes.tolist()] or [np.empty(0, np.uint64)]
        )
        which = np.repeat(np.arange(part.count), part.nbytes.astype(np.int64))
        columns.append(
            np.column_stack(
                [
                    part.target[which] + within,
                    part.source[which] + within,
                    part.target_region[which].astype(np.uint64),
                    part.source_region[which].astype(np.uint64),
                ]
            )
        )
    table = np.concatenate(columns)
    return table[np.argsort(table[:, 0], kind="stable")]
