"""Generates cases: one strategy for each topology that must work."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from .case import KINDS, Case, Model, Side

__all__ = ["KINDS", "PROFILE", "TOPOLOGIES", "at_scale", "cases"]

PROFILE = settings(
    derandomize=True,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink] if os.environ.get("STATELINK_SHRINK") else [Phase.generate],
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
"""The same cases on every run. Set STATELINK_SHRINK to get the smallest failing case, to keep as a regression test."""

at_scale = pytest.mark.parametrize(
    "scale", [pytest.param(1, id="few"), pytest.param(20, id="many", marks=pytest.mark.soak)]
)
"""As many cases as every run has time for, the same each time; and for `make soak` so many times more."""

Draw = st.DrawFn
WIDTHS = [(a, b) for a in (1, 2, 3, 4, 6, 8) for b in (1, 2, 3, 4, 6, 8)]
PAGES = (1, 2, 3, 4, 6, 8)
SUBSETS = [each for n in (1, 2, 3, 6) for each in itertools.combinations(KINDS, n)]
TOPOLOGIES = (
    "equal widths",
    "wide to narrow",
    "narrow to wide",
    "widths that do not divide",
    "replicated heads",
    "stages to one",
    "stages to stages",
    "draft layers on decode",
    "page sizes",
    "page orders",
    "envelope to layers",
    "layers to envelope",
    "prefix",
    "chunks",
    "by layers",
)

_WIDTHS: dict[str, Callable[[int, int], bool]] = {
    "equal widths": lambda s, d: s == d,
    "wide to narrow": lambda s, d: s > d and s % d == 0,
    "narrow to wide": lambda s, d: s < d and d % s == 0,
    "widths that do not divide": lambda s, d: s % d != 0 and d % s != 0,
    "replicated heads": lambda s, d: max(s, d) > 1,
}


def _any_widths(source: int, target: int) -> bool:
    return True


@st.composite
def cases(draw: Draw, topology: str, kind: str) -> Case:
    """A case of one topology with one kind of state, among others; what these leave open is free."""
    fits = _WIDTHS.get(topology, _any_widths)
    staged = topology in ("stages to one", "stages to stages", "draft layers on decode")
    widths = draw(st.sampled_from([(s, d) for s, d in WIDTHS if fits(s, d) and (not staged or s <= 3)]))
    model = draw(_models(topology, kind, widths))
    stages = _stage_counts(draw, topology, model, widths)
    source, target = (
        draw(_sides(topology, model, width, count, is_source=number == 0))
        for number, (width, count) in enumerate(zip(widths, stages, strict=True))
    )
    if topology == "page sizes" and source.page == target.page:
        source = _with(source, page=draw(st.sampled_from([page for page in PAGES if page != target.page])))
    if topology == "page orders" and source.order == target.order:
        source = _with(source, order="nhd" if target.order == "hnd" else "hnd")
    tokens = draw(st.integers(1, 40))
    prefixes = st.integers(1 if topology == "prefix" else 0, math.ceil(tokens / target.page))
    prefix = min(draw(prefixes) * target.page, tokens)
    unit = math.lcm(source.page, source.window_page)
    most = math.ceil(tokens / unit)
    cuts = draw(st.lists(st.integers(0, most), min_size=int(topology == "chunks"), max_size=4))
    depth = model.depth + len(model.draft)
    by_layers = topology == "by layers" or draw(st.integers(0, 4)) == 4
    layer_cuts = draw(st.sets(st.integers(1, depth - 1), min_size=1, max_size=3)) if by_layers and depth > 1 else set()
    return Case(
        model=model,
        source=source,
        target=target,
        tokens=tokens,
        prefix=prefix,
        prefix_known=draw(st.booleans()),
        chunks=(*sorted(cuts), most),
        layer_cuts=tuple(sorted(layer_cuts)),
        max_blocks=draw(st.sampled_from([1 << 18, 64, 7, 1])),
        seed=draw(st.integers(0, 1 << 32)),
    )


@st.composite
def _models(draw: Draw, topology: str, kind: str, widths: tuple[int, int]) -> Model:
    depth = draw(st.integers(3 if topology.startswith("stages") or topology == "by layers" else 1, 6))
    kinds = {kind, *draw(st.sampled_from(SUBSETS))}
    some = st.sets(st.integers(0, depth - 1), min_size=1, max_size=3).map(lambda each: tuple(sorted(each)))
    layers = {each: draw(some) if each in kinds else () for each in KINDS if each != "aux"}
    both = math.lcm(*widths)
    shared = [n for n in range(1, 13) if all(n % width == 0 or width % n == 0 for width in widths)]
    heads = [n for n in shared if topology != "replicated heads" or n < max(widths)]
    key = both * draw(st.integers(1, 2))
    # Key heads that several ranks share, beside value channels that are divided.
    few = draw(st.sampled_from(heads))
    replicated = ((2 * few, few), (2 * few, few), (2 * both, both))
    divided = [(key, key, 2 * key), (key, key, key), (key, 3 * both), (both,)]
    groups = draw(st.sampled_from([tuple((n, n) for n in each) for each in divided]))
    if topology == "replicated heads" or draw(st.integers(0, 3)) == 3:
        groups = replicated
    draft: tuple[int, ...] = ()
    if topology == "draft layers on decode" or (layers["kv"] and draw(st.integers(0, 5)) == 5):
        draft = tuple(range(depth, depth + draw(st.integers(1, 2))))
        layers["kv"] = layers["kv"] or (depth - 1,)
    if draft or topology in ("replicated heads", "page orders"):
        layers["kv"] = layers["kv"] or (0,)
    return Model(
        **layers,
        aux="aux" in kinds,
        depth=depth,
        heads=draw(st.sampled_from(heads)),
        window_heads=draw(st.sampled_from(heads)),
        window=draw(st.integers(1, 24)),
        dims=draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        groups=groups,
        kernel=draw(st.integers(1, 3)),
        state_heads=draw(st.sampled_from(shared)),
        dtype=draw(st.sampled_from(["uint8", "uint16", "float32"])),
        draft=draft,
    )


@st.composite
def _sides(draw: Draw, topology: str, model: Model, tp: int, stages: int, *, is_source: bool) -> Side:
    styles = st.sampled_from(["separate", "stacked", "envelope"])
    style = draw(styles)
    if topology in ("envelope to layers", "layers to envelope"):
        style = "envelope" if is_source == (topology == "envelope to layers") else "separate"
    inner = st.sets(st.integers(1, model.depth - 1), min_size=stages - 1, max_size=stages - 1) if stages > 1 else None
    page = draw(st.sampled_from(PAGES))
    return Side(
        tp=tp,
        cuts=(*sorted(draw(inner) if inner is not None else ()), model.depth),
        page=page,
        window_page=draw(st.sampled_from(PAGES)),
        order=draw(st.sampled_from(["nhd", "hnd"])),
        style=style,
        padded=draw(st.booleans()),
        one_region=draw(st.booleans()),
        transposed=draw(st.booleans()),
        shared=tuple(sorted(draw(st.sets(st.sampled_from(model.dsa or (0,)), max_size=max(len(model.dsa) - 1, 0))))),
    )


def _stage_counts(draw: Draw, topology: str, model: Model, widths: tuple[int, int]) -> tuple[int, int]:
    most = [min(model.depth, 3 if width <= 3 else 1) for width in widths]
    low = 2 if topology in ("stages to one", "stages to stages") else 1
    source = draw(st.integers(low, max(most[0], low)))
    target = draw(st.integers(low, max(most[1], low))) if topology == "stages to stages" else 1
    return source, target


def _with(side: Side, **changes: object) -> Side:
    return dataclasses.replace(side, **changes)  # type: ignore[arg-type]
