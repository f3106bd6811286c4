"""Two processes that hand one component over, with whatever packages of third parties each has installed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.engine import Engine
from tests.helpers.pair import Pair
from tests.helpers.pools import Index, Shapes

from statelink import state

Environment = Mapping[str, str]
PACKAGES = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "packages"), *filter(None, sys.path)])}


@dataclass(frozen=True, kw_only=True)
class Pages(Index):
    """Pages whose items move whole, of a type that may be a third party's."""

    name: str = "pages"
    page: int = 4

    def shapes(self) -> Shapes:
        return {"pool": ((self.pages, self.page, 24), "uint8")}

    def describe(self, arrays: dict[str, Any]) -> state.Described:
        pool, kind = arrays["pool"], self.type
        items = state.whole_items({"pool": pool}, name="pages", type=kind, page=4)
        return items


@contextlib.contextmanager
def parties(
    folder: Path,
    backend: str,
    kind: str,
    prefill: Environment | None = None,
    decode: Environment | None = None,
    **config: Any,
) -> Iterator[Pair]:
    """Open a link in each. Without `STATELINK_PLUGINS`, a process has every package; with it, those that are named."""
    given = {"prefill": prefill or {}, "decode": decode or {}}
    engines = [Engine(folder, role, environment={**PACKAGES, **each}) for role, each in given.items()]
    try:
        opened = [engine.begin_open(engine.name, backend, [Pages(type=kind)], **config) for engine in engines]
        yield Pair(*(each() for each in opened))
    finally:
        for engine in engines:
            engine.leave()


def hand_over(pair: Pair) -> int:
    """Move ten pages, and look at every byte; in how many blocks, as both sides count them."""
    case = pair.case(40)
    receiving, sending = pair.begin(case)
    pair.push(sending, case)
    pair.ended(case, receiving, sending)
    left, arrived = (room.see().report.moved["pages"].blocks for room in (sending, receiving))
    assert left == arrived
    return left
