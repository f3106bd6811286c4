"""Several ranks on a side, as links of real processes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.helpers.expect import Case, carry, held, wanted

if TYPE_CHECKING:
    from tests.helpers.engine import Engine, LinkHandle, RoomHandle
    from tests.helpers.pools import Component, Memory
    from tests.helpers.worker import Seen
    from tests.link.conftest import TwoEngines

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
        opening = []
        for rank in range(len(pools)):
            config: dict[str, Any] = {"rank": rank, "ranks": len(pools), **FAST, **more}
            config |= {"engine": engines[rank]} if engines else {}
            opening.append(two_engines.begin_open(role, pools[rank], **config))
        self.links: list[LinkHandle] = [opened() for opened in opening]
        for link in self.links if role == "decode" else ():
            link.siblings([each.address for each in self.links if each is not link])
        self.memories: list[Memory] = [link.memory for link in self.links]

    def items(self, rng: np.random.Generator, tokens: int, prefix: int | None = None) -> dict[str, list[int]]:
        """Drawn at random, and the same on every rank, as engines do."""
        pools = {pool.name: (memory, pool) for memory in self.memories for pool in memory.pools}
        return {
            name: rng.permutation(memory.count(name))[: wanted(pool, tokens, prefix)].tolist()
            for name, (memory, pool) in pools.items()
        }


class Fleet:
    """Prefill ranks and decode ranks with such pools, and requests between them with every byte looked at.

    Every prefill rank that holds a part is given the same bytes for it. For ``engines`` see `Group`.
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
        self.expected = [memory.copy() for memory in self.decode.memories]
        self.rng = np.random.default_rng(3)
        seen: dict[tuple[str, str, bytes], Any] = {}
        for memory in self.prefill.memories:
            for pool in memory.pools:
                for label, array in memory.arrays[pool.name].items():
                    array[:] = seen.setdefault((pool.name, label, held(pool, label).tobytes()), array)

    def case(self, tokens: int, prefix: int = 0) -> Case:
        source, target = self.prefill.items(self.rng, tokens), self.decode.items(self.rng, tokens, prefix)
        return Case(next(_rooms), tokens, prefix, source, target)

    def receive(self, case: Case, **more: Any) -> list[RoomHandle]:
        named = {"prefix": case.prefix, "deadline": 30, **more}
        links = self.decode.links
        return [link.receive(case.room, self.peer, case.tokens, only(case.target, link), **named) for link in links]

    def send(self, case: Case, cuts: Sequence[int] = (), **named: Any) -> list[RoomHandle]:
        rooms = [link.send(case.room, case.tokens, deadline=30, **named) for link in self.prefill.links]
        for room, memory in zip(rooms, self.prefill.memories, strict=True):
            for first, last in itertools.pairwise([0, *cuts, case.tokens]):
                room.push(case.span(first, last, memory.pools), span=(first, last))
        return rooms

    def run(self, tokens: int, prefix: int = 0, cuts: Sequence[int] = ()) -> list[Seen]:
        """One request that goes well, and nothing else happens to any byte; what each rank of prefill says of it."""
        case = self.case(tokens, prefix)
        before = [memory.copy() for memory in self.prefill.memories]
        receiving, sending = self.receive(case), self.send(case, cuts)
        for room in receiving:
            room.succeeded()
        sent = [room.succeeded() for room in sending]
        for expected in self.expected:
            carry(self.prefill.memories, expected, case)
        found = [*self.decode.memories, *self.prefill.memories]
        for memory, expected in zip(found, [*self.expected, *before], strict=True):
            assert memory.differences(expected) == []
        return sent


def only(items: Any, link: LinkHandle) -> dict[str, list[int]]:
    return {name: ids for name, ids in items.items() if name in link.memory.arrays}
