"""Draws scenes: of each kind of state in each topology, and of each way of dealing positions out over ranks.

Draws follow from the name of a case alone, so that every run has the same cases and each can be had again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import pytest

from .kinds import KINDS, PAGES, Frame, Made
from .scene import Lay, Scene, Side

__all__ = ["DEALINGS", "TOPOLOGIES", "at_scale", "dealt_scene", "scene"]

at_scale = pytest.mark.parametrize(
    "scale", [pytest.param(1, id="few"), pytest.param(20, id="many", marks=pytest.mark.soak)]
)
"""As many cases as every run has time for, the same each time; and for `make soak` so many times more."""

WIDTHS = [(s, d) for s in (1, 2, 3, 4, 6, 8) for d in (1, 2, 3, 4, 6, 8)]
NARROW = [(s, d) for s, d in WIDTHS if max(s, d) <= 4]

TOPOLOGIES: dict[str, Callable[[int, int], bool]] = {
    "equal widths": lambda s, d: s == d,
    "wide to narrow": lambda s, d: s > d and s % d == 0,
    "narrow to wide": lambda s, d: s < d and d % s == 0,
    "widths that do not divide": lambda s, d: s % d != 0 and d % s != 0,
    "replicated heads": lambda s, d: max(s, d) > 1,
    "stages to one": lambda s, d: s <= 3,
    "stages to stages": lambda s, d: s <= 3,
    "draft layers on decode": lambda s, d: s <= 3,
    "page sizes": lambda s, d: True,
    "page orders": lambda s, d: True,
    "envelope to layers": lambda s, d: True,
    "layers to envelope": lambda s, d: True,
    "prefix": lambda s, d: True,
    "chunks": lambda s, d: True,
    "by layers": lambda s, d: True,
}
"""What must work, and the tensor-parallel widths of prefill and decode that it needs."""

ALONE = ("draft on decode only", "kv in turns", *(kind for kind in KINDS if kind.startswith("chunked_local")))
"""Kinds of state that are not drawn beside others."""

ANY_WIDTH = 5
"""Topologies about widths have all of them; the others have narrow ones more often, since those are quick."""


def scene(kind: str, topology: str, number: int) -> Scene:
    """A scene of one topology with one kind of state, and some others beside it; what these leave open is free."""
    rng = Random(f"{kind}, {topology}, {number}")
    fits = TOPOLOGIES[topology]
    choices = WIDTHS if list(TOPOLOGIES).index(topology) < ANY_WIDTH or rng.random() < 0.2 else NARROW
    widths = rng.choice([pair for pair in choices if fits(*pair)])
    staged = topology.startswith("stages") or topology == "by layers"
    depth = rng.randint(3 if staged else 1, 6)
    page = rng.choice(PAGES), rng.choice(PAGES)
    frame = Frame(rng, topology, depth, widths, page, rng.choice(["uint8", "uint16", "float32"]))
    others = rng.sample([each for each in KINDS if each not in ALONE], rng.randint(0, 2))
    if rng.random() < 0.15:
        others.append("mamba")  # hybrids
    if kind == "draft on decode only" or topology in ("draft layers on decode", "replicated heads", "page orders"):
        others.append("kv")
    made = [KINDS[name](frame, name) for name in dict.fromkeys((kind, *others))]
    stages = _stages(rng, topology, depth, widths)
    shards = (2 if max(widths) <= 4 and rng.random() < 0.25 else 1), 1
    return _scene(frame, made, stages, shards, rng.choice([rng.randint(1, 60), rng.randint(20, 60)]))


def _stages(rng: Random, topology: str, depth: int, widths: tuple[int, int]) -> tuple[int, int]:
    most = [min(depth, 3) if width <= 3 else 1 for width in widths]
    low = 2 if topology.startswith("stages") else 1
    source = rng.randint(low, max(most[0], low))
    target = rng.randint(2, max(most[1], 2)) if topology == "stages to stages" else 1
    return source, target


Deal = tuple[str, int]
ALL, RANGES = ("all", 1), ("contiguous", 1)


@dataclass(frozen=True)
class Dealing:
    """How the ranks of both sides share the positions of a request."""

    source: Deal = ALL
    target: Deal = ALL
    """The way, and the pages of a block; 0 for single tokens."""
    alike: bool = False
    """Whether both sides have as many ranks and pages of one size."""
    few: bool = False
    """Whether there are fewer pages than ranks."""
    beside: tuple[bool, bool] = (False, False)
    """Whether a further rank of a side holds all positions."""


BY_TOKEN, BY_PAGE = ("cyclic", 0), ("cyclic", 1)
DEALINGS: dict[str, Dealing] = {
    "context-parallel prefill": Dealing(RANGES),
    "fewer pages than ranks": Dealing(RANGES, few=True),
    "decode context parallelism": Dealing(target=BY_TOKEN),
    "decode context parallelism with a draft": Dealing(target=BY_TOKEN),
    "context parallelism on both sides": Dealing(RANGES, BY_TOKEN),
    "prefill deals pages": Dealing(BY_PAGE),
    "prefill deals tokens": Dealing(BY_TOKEN),
    "both deal tokens": Dealing(BY_TOKEN, BY_TOKEN, alike=True),
    "both deal pages": Dealing(BY_PAGE, BY_PAGE, alike=True),
    "both deal in different ways": Dealing(BY_PAGE, BY_TOKEN),
    "decode holds ranges": Dealing(target=RANGES),
    "both hold ranges": Dealing(RANGES, RANGES),
    **{
        f"a rank of {side} beside {way} has all": Dealing(
            deal if beside[0] else ALL, deal if beside[1] else ALL, beside=beside, alike=True
        )
        for way, deal in (("ranges", RANGES), ("tokens", BY_TOKEN), ("pages", BY_PAGE))
        for side, beside in (("prefill", (True, False)), ("decode", (False, True)), ("both", (True, True)))
    },
}
"""Ways in which ranks share the positions of a request."""


def dealt_scene(name: str, number: int) -> Scene:
    """A scene whose positions are dealt out over ranks, with state beside it that is not."""
    rng = Random(f"{name}, {number}")
    way = DEALINGS[name]
    widths = rng.choice([(1, 1), (1, 2), (2, 1), (4, 2), (2, 4)]) if not any(way.beside) else (1, 1)
    page = rng.choice(PAGES), rng.choice(PAGES)
    page = (page[0], page[0]) if way.alike else page
    frame = Frame(rng, name, rng.randint(1, 3), widths, page, "uint8")
    kinds = ["kv", "kv of latents", "dsa", "minimax_index_k", "minimax_dense_kv"]
    if BY_TOKEN not in (way.source, way.target):
        kinds.append("block_scale")  # its items have no rows, and are dealt out where no page is cut
    kind = rng.choice(kinds)
    pool, source, target = KINDS[kind](frame, "dealt")
    page = (source.page, source.page) if kind == "block_scale" else page
    size = rng.randint(2, 5 if way.few else 4)
    shards = tuple(
        (size if way.alike or number == 0 else rng.randint(2, 4)) + beside if deal != ALL else 1
        for number, (deal, beside) in enumerate(zip((way.source, way.target), way.beside, strict=True))
    )
    lays = [
        replace(
            lay,
            page=pages,
            deal=deal[0],
            block=pages if deal == BY_PAGE else 1,
            whole=rng.choice([0, count - 1]) if beside else None,
        )
        for lay, pages, deal, count, beside in zip(
            (source, target), page, (way.source, way.target), shards, way.beside, strict=True
        )
    ]
    made: list[Made] = [(pool, lays[0], lays[1])]
    if name.endswith("draft"):
        draft = KINDS["kv of latents"](frame, "draft")[0]
        made.append((draft, Lay(page[0]), Lay(page[1] * shards[1])))
    beside_it = rng.choice(["aux", "hidden", "mamba", "swa_ring", "swa_ring with heads", "dsa_tail"])
    made.append(KINDS[beside_it](frame, "beside"))
    tokens = rng.randint(1, page[0] * (shards[0] - 1)) if way.few else rng.randint(1, 60)
    return _scene(frame, made, (1, 1), (shards[0], shards[1]), tokens)


def _scene(frame: Frame, made: list[Made], stages: tuple[int, int], shards: tuple[int, int], tokens: int) -> Scene:
    rng, topology = frame.rng, frame.topology
    styles = ["separate", "stacked", "envelope"]
    sides = []
    for number, (count, ranks) in enumerate(zip(stages, shards, strict=True)):
        style = rng.choice(styles)
        if topology in ("envelope to layers", "layers to envelope"):
            style = "envelope" if topology.startswith("envelope") == (number == 0) else "separate"
        inner = sorted(rng.sample(range(1, frame.depth), count - 1))
        sides.append(
            Side(
                tp=frame.widths[number],
                shards=ranks,
                cuts=(*inner, frame.depth),
                lays={pool.name: lays[number] for pool, *lays in made},
                style=style,
                padded=rng.random() < 0.5,
                one_region=rng.random() < 0.5,
                axes=rng.random() < 0.5,
                slot=rng.randint(0, 5),
            )
        )
    # A prefix ends between two pages of decode, where the type says so.
    step = math.lcm(
        *(
            lay.page * (shards[1] - (lay.whole is not None) if lay.deal == "cyclic" and lay.block % lay.page else 1)
            for pool, _, lay in made
            if pool.coverage == "suffix"
        )
    )
    most = math.ceil(tokens / step)
    prefixes = [1, most // 2, rng.randint(1, most), most - 1, most]
    prefix = max(1, rng.choice(prefixes)) if topology == "prefix" else rng.choice([0] * 5 + prefixes)
    depth = 1 + max((part.layer or 0 for pool, *_ in made for part in pool.parts), default=0)
    cuts: list[int] = []
    if depth > 1 and (topology == "by layers" or rng.random() < 0.2):
        cuts = sorted(rng.sample(range(1, depth), rng.randint(1, min(3, depth - 1))))
    return Scene(
        pools=tuple(pool for pool, *_ in made),
        source=sides[0],
        target=sides[1],
        tokens=tokens,
        prefix=min(prefix * step, tokens),
        prefix_known=rng.random() < 0.5,
        chunks=tuple(rng.sample(range(21), rng.randint(1 if topology == "chunks" else 0, 3))),
        layer_cuts=tuple(cuts),
        max_blocks=rng.choice([1 << 18, 64, 7, 1]),
        parcel=rng.choice([0] * 8 + [1, 40, 40, 300, 300, 1 << 20]),
        seed=rng.randint(0, 1 << 32),
    )
