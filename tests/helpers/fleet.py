"""Several ranks on a side, as links of real processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.helpers.expect import Case, carry, held
from tests.helpers.pools import Component, Index, Kv, Memory

from statelink.testing import free_addresses

if TYPE_CHECKING:
    from tests.helpers.engine import Engine, LinkHandle, RoomHandle
    from tests.helpers.worker import Seen
    from tests.link.conftest import TwoEngines

__all__ = ["FAST", "Fleet", "only", "replicate"]

FAST: dict[str, Any] = {"heartbeat": 0.25, "liveness": 5.0}
_rooms = itertools.count(40_000)


class Group:
    """The ranks of one side: in one process, or each in one of ``engines``."""

    def __init__(
        self,
        two_engines: TwoEngines,
        role: str,
        pools: Sequence[Sequence[Component]],
        engines: Sequence[Engine] = (),
        **more: Any,
    ) -> None:
        listen = free_addresses(len(pools))
        self.links: list[LinkHandle] = []
        opening: list[Callable[[], LinkHandle]] = []
        for rank, each in enumerate(pools):
            config: dict[str, Any] = {"listen": listen[rank], "rank": rank, "ranks": len(pools), **FAST, **more}
            if role == "decode":
                config["siblings"] = tuple(address for address in listen if address != listen[rank])
            if engines:
                config["engine"] = engines[rank]
            opening.append(two_engines.begin_open(role, each, **config))
            if not engines:  # a process opens one after the other
                self.links.append(opening.pop()())
        self.links += [opened() for opened in opening]

    @property
    def memories(self) -> list[Memory]:
        return [link.memory for link in self.links]


class Fleet:
    """Prefill ranks and decode ranks, and requests between them with every byte looked at.

    Args:
        two_engines: Where processes come from.
        prefill: Pools of each rank.
        decode: Pools of each rank.
        engines: A process for each rank of each side, where the ranks of a side do not share one.
        **config: What all links are configured with.
    """

    def __init__(
        self,
        two_engines: TwoEngines,
        prefill: Sequence[Sequence[Component]],
        decode: Sequence[Sequence[Component]],
        engines: tuple[Sequence[Engine], Sequence[Engine]] = ((), ()),
        **config: Any,
    ) -> None:
        self.prefill = Group(two_engines, "prefill", prefill, engines[0], **config)
        self.decode = Group(two_engines, "decode", decode, engines[1], **config)
        self.peer = [link.address for link in self.prefill.links]
        replicate(self.prefill.memories)
        self.expected = [memory.copy() for memory in self.decode.memories]
        self.rng = np.random.default_rng(3)

    def case(self, tokens: int, prefix: int = 0) -> Case:
        """Every rank of a side uses the same items, as engines do."""
        source: dict[str, list[int]] = {}
        target: dict[str, list[int]] = {}
        for memories, found, start in ((self.prefill.memories, source, 0), (self.decode.memories, target, prefix)):
            for pool in (each for memory in memories for each in memory.pools):
                each = len(next(iter(next(m for m in memories if pool.name in m.arrays).arrays[pool.name].values())))
                wanted = 1
                if isinstance(pool, (Kv, Index)):
                    window = pool.window if isinstance(pool, Kv) else 0
                    first = max(start, tokens - window if window and start is prefix and found is target else start)
                    wanted = -(-tokens // pool.page) - first // pool.page
                found.setdefault(pool.name, self.rng.permutation(each)[:wanted].tolist())
        return Case(next(_rooms), tokens, prefix, source, target)

    def receive(self, case: Case) -> list[RoomHandle]:
        return [
            link.receive(case.room, self.peer, case.tokens, only(case.target, link), prefix=case.prefix, deadline=30)
            for link in self.decode.links
        ]

    def send(self, case: Case, cuts: Sequence[int] = (), **named: Any) -> list[RoomHandle]:
        rooms = []
        for link in self.prefill.links:
            room = link.send(case.room, case.tokens, deadline=30, **named)
            for first, last in itertools.pairwise([0, *cuts, case.tokens]):
                room.push(case.span(first, last, link.memory.pools), span=(first, last))
            rooms.append(room)
        return rooms

    def run(self, tokens: int, prefix: int = 0, cuts: Sequence[int] = ()) -> list[Seen]:
        """One request that goes well, and nothing else happens to any byte; what each rank of prefill says of it."""
        case = self.case(tokens, prefix)
        before = [memory.copy() for memory in self.prefill.memories]
        receiving, sending = self.receive(case), self.send(case, cuts)
        for room in receiving:
            room.succeeded()
        sent = [room.succeeded() for room in sending]
        for memory, expected in zip(self.decode.memories, self.expected, strict=True):
            carry(self.prefill.memories, expected, case)
            assert memory.differences(expected) == []
        for memory, same in zip(self.prefill.memories, before, strict=True):
            assert memory.differences(same) == []
        return sent


def only(items: Any, link: LinkHandle) -> dict[str, list[int]]:
    return {name: ids for name, ids in items.items() if name in link.memory.arrays}


def replicate(memories: Sequence[Memory]) -> None:
    """Give every rank that holds a part the same bytes for it."""
    seen: dict[tuple[str, str, bytes], Any] = {}
    for memory in memories:
        for pool in memory.pools:
            for label, array in memory.arrays[pool.name].items():
                array[:] = seen.setdefault((pool.name, label, held(pool, label).tobytes()), array)
