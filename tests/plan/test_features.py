"""What generated cases must not merely happen to have: each of these occurs in a stated number of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .carry import carry
from .deliver import deliver
from .pool_strategies import DEALT, dealt_scenes, scenes
from .pools import Pool, need
from .strategies import PROFILE, at_scale, cases

if TYPE_CHECKING:
    from .case import Case
    from .pools import Lay, Scene

EXAMPLES = 8
"""Cases per feature."""

Fits = Callable[["Scene", Pool, "Lay", "Lay"], bool]

RINGS = ("swa_ring", "dsa_tail", "dsv4_c4_state", "c128_state")
SUFFIX = ("kv", "kv of latents", "kv in planar pages", "dsa", "dsv4", "minimax_index_k")
HEADS = ("kv", "swa", "minimax_dense_kv", "block_scale with heads")


def wraps(scene: Scene, pool: Pool, lay: Lay) -> bool:
    a, b = need(pool, scene.tokens, scene.prefix)
    return a < b and a % lay.ring > (b - 1) % lay.ring


SCENES: dict[str, tuple[tuple[str, ...], Fits]] = {
    "rings of different length": (RINGS, lambda scene, pool, s, t: s.ring != t.ring),
    "a ring that wraps on one side only": (
        RINGS[:3],
        lambda scene, pool, s, t: wraps(scene, pool, s) != wraps(scene, pool, t),
    ),
    "nothing pending": (("dsa_tail", "c128_state"), lambda scene, pool, s, t: scene.tokens % pool.group == 0),
    "page sizes and a window": (("swa",), lambda scene, pool, s, t: s.page != t.page and pool.window < scene.tokens),
    "page sizes and a prefix": (SUFFIX, lambda scene, pool, s, t: s.page != t.page and 0 < scene.prefix < scene.tokens),
    "page sizes and a prefix, whole": (
        ("minimax_dense_kv", "qsa_compressed"),
        lambda scene, pool, s, t: s.page != t.page and scene.prefix > 0,
    ),
    "page sizes and chunks": (SUFFIX, lambda scene, pool, s, t: s.page != t.page and len(set(scene.chunks)) > 1),
    "a prefix of which prefill's page holds a part": (
        SUFFIX,
        lambda scene, pool, s, t: scene.prefix % s.page > 0 and scene.prefix < scene.tokens,
    ),
    "a prefix that leaves no page": (SUFFIX, lambda scene, pool, s, t: scene.prefix == scene.tokens),
    "a prefix inside the window": (
        ("swa", "block_scale_swa"),
        lambda scene, pool, s, t: 0 < scene.tokens - pool.window < scene.prefix < scene.tokens,
    ),
    "a prefix inside a page of complete groups": (
        ("dsv4_c128",),
        lambda scene, pool, s, t: scene.prefix % t.page > 0 and scene.prefix < scene.tokens,
    ),
    "several compression ratios": (("dsv4",), lambda scene, pool, s, t: len({part.unit for part in pool.parts}) > 1),
    "several compression ratios over stages": (
        ("dsv4",),
        lambda scene, pool, s, t: len({part.unit for part in pool.parts}) > 1 and len(scene.source.cuts) > 1,
    ),
    "stages cut differently on both sides": (
        (*SUFFIX, "dsv4_c128", "qsa_pending"),
        lambda scene, pool, s, t: (
            scene.source.cuts != scene.target.cuts and min(len(scene.source.cuts), len(scene.target.cuts)) > 1
        ),
    ),
    "fewer heads than ranks on both sides": (
        HEADS,
        lambda scene, pool, s, t: pool.parts[0].shape[0] < min(scene.source.tp, scene.target.tp),
    ),
    "fewer heads than ranks, widths differ": (
        HEADS,
        lambda scene, pool, s, t: (
            scene.source.tp != scene.target.tp and pool.parts[0].shape[0] < max(scene.source.tp, scene.target.tp)
        ),
    ),
    "states replicated by context parallelism": (
        ("aux", "hidden", "swa_ring", "dsa"),
        lambda scene, pool, s, t: scene.source.shards > 1,
    ),
    "a layer that shares its index on one side": (
        ("dsa_tail",),
        lambda scene, pool, s, t: any(part.empty[0] != part.empty[1] for part in pool.parts),
    ),
}


@at_scale
@pytest.mark.parametrize("feature", SCENES)
def test_scenes_with(feature: str, scale: int) -> None:
    kinds, fits = SCENES[feature]
    counted = 0

    def has(scene: Scene) -> bool:
        pool = next(pool for pool in scene.pools if pool.name in kinds)
        return fits(scene, pool, scene.source.lays[pool.name], scene.target.lays[pool.name])

    @settings(PROFILE, max_examples=scale * EXAMPLES)
    @given(st.sampled_from(kinds).flatmap(scenes).filter(has))
    def check(scene: Scene) -> None:
        nonlocal counted
        deliver(scene)
        counted += 1

    check()
    assert counted >= scale * EXAMPLES


DEALINGS: dict[str, Callable[[Scene], bool]] = {
    "a rank without pages": lambda scene: (
        math.ceil(scene.tokens / scene.source.lays["dealt"].page) < scene.source.shards
    ),
    "a partial last page": lambda scene: scene.tokens % scene.target.lays["dealt"].page > 0,
    "page sizes": lambda scene: scene.target.lays["dealt"].page != scene.source.lays["dealt"].page,
    "a prefix": lambda scene: 0 < scene.prefix < scene.tokens,
    "chunks": lambda scene: len(set(scene.chunks)) > 1,
}


@at_scale
@pytest.mark.parametrize("feature", DEALINGS)
def test_dealt_positions_with(feature: str, scale: int) -> None:
    counted = 0
    names = DEALT[:2] if feature == "a rank without pages" else DEALT

    @settings(PROFILE, max_examples=2 * scale * EXAMPLES)
    @given(st.sampled_from(names).flatmap(dealt_scenes).filter(DEALINGS[feature]))
    def check(scene: Scene) -> None:
        nonlocal counted
        deliver(scene)
        counted += 1

    check()
    assert counted >= 2 * scale * EXAMPLES


def few_heads(case: Case) -> bool:
    """Convolution heads that several ranks of one side hold."""
    return any(units < max(case.source.tp, case.target.tp) for _, units in case.model.groups)


CASES: dict[str, tuple[str, Callable[[Case], bool]]] = {
    "latents alone": ("mla", lambda case: case.source.tp != case.target.tp and not case.model.mamba),
    "latents beside linear attention": ("mla", lambda case: bool(case.model.mamba)),
    "grouped convolutions, narrower": (
        "mamba",
        lambda case: len(case.model.groups) > 2 and case.source.tp > case.target.tp,
    ),
    "grouped convolutions, wider": (
        "mamba",
        lambda case: len(case.model.groups) > 2 and case.source.tp < case.target.tp,
    ),
    "convolution heads replicated, narrower": (
        "mamba",
        lambda case: few_heads(case) and case.source.tp > case.target.tp,
    ),
    "convolution heads replicated, wider": ("mamba", lambda case: few_heads(case) and case.source.tp < case.target.tp),
    "transposed on one side": ("mamba", lambda case: case.source.transposed != case.target.transposed),
    "transposed on both sides": ("mamba", lambda case: case.source.transposed and case.target.transposed),
}


@at_scale
@pytest.mark.parametrize("feature", CASES)
def test_cases_with(feature: str, scale: int) -> None:
    kind, fits = CASES[feature]
    topology = "replicated heads" if "replicated" in feature else "by layers"
    counted = 0

    @settings(PROFILE, max_examples=scale * EXAMPLES)
    @given(cases(topology, kind).filter(fits))
    def check(case: Case) -> None:
        nonlocal counted
        carry(case)
        counted += 1

    check()
    assert counted >= scale * EXAMPLES
