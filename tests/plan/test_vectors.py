"""The numeric vectors of the field: what today's engines move, to the byte, where it is right."""

from __future__ import annotations

import pytest

from statelink import plan, state
from statelink.plan import Pages

from .small import STEP, at, describe, keys, moves, pointer, ranks, runs


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ([4, 5, 6, 9, 10, 20], [7, 8, 9, 10, 11, 12], [(4, 7, 3), (9, 10, 2), (20, 12, 1)]),
        ([4, 5, 6, 7], [7, 8, 20, 21], [(4, 7, 2), (6, 20, 2)]),
        ([3, 2, 1], [7, 8, 9], [(3, 7, 1), (2, 8, 1), (1, 9, 1)]),
        ([3, 2, 1], [9, 8, 7], [(3, 9, 1), (2, 8, 1), (1, 7, 1)]),
        ([5], [0], [(5, 0, 1)]),
        (list(range(30)), list(range(30)), [(0, 0, 30)]),
    ],
)
def test_neighbouring_pages_are_one_block(
    source: list[int], target: list[int], expected: list[tuple[int, int, int]]
) -> None:
    item = 4 * 6
    p, d = (describe(name, state.mla_pages({0: pointer(1, 40, 4, 6)})) for name in "pd")
    (part,) = plan.route([p], [d])
    found = moves(p, d, part, "kv", (source, target), tokens=4 * len(source))
    assert runs(found, 1) == [(s * item, t * item, n * item) for s, t, n in expected]


def test_each_buffer_has_its_own_item() -> None:
    """V may be wider than K: K's item length is not used for V."""
    made = {
        name: state.kv_pages({0: (pointer(1, 9, 2, 1, 4), pointer(2, 9, 2, 1, 10))}, heads=1) for name in ("p", "d")
    }
    p, d = (describe(name, described) for name, described in made.items())
    (part,) = plan.route([p], [d])
    found = moves(p, d, part, "kv", ([3, 4], [7, 8]), tokens=4)
    assert runs(found, 1) == [(3 * 8, 7 * 8, 16)]
    assert runs(found, 2) == [(3 * 20, 7 * 20, 40)]


def heads(total: int, width: int) -> int:
    return max(1, total // width)


def kv_instance(name: str, total: int, width: int, page: int = 16) -> list[state.Inventory]:
    local = heads(total, width)
    return ranks(name, width, lambda r: keys([0], 12, page, local, 128, itemsize=2, heads=total, tp=(r, width)))


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        # source, destination -> source offset and destination offset of token 0, bytes per token
        ((4, 2), {(0, 0): (0, 0), (1, 0): (0, 512), (2, 1): (0, 0), (3, 1): (0, 512)}),
        ((2, 4), {(0, 0): (0, 0), (0, 1): (512, 0), (1, 2): (0, 0), (1, 3): (512, 0)}),
    ],
)
def test_heads_are_sliced_token_by_token(
    widths: tuple[int, int], expected: dict[tuple[int, int], tuple[int, int]]
) -> None:
    """T = 8, head_dim 128, bf16, pages of 16."""
    sources, targets = kv_instance("p", 8, widths[0]), kv_instance("d", 8, widths[1])
    items = [16 * heads(8, width) * 256 for width in widths]
    parts = {(part.source, part.target): part for part in plan.route(sources, targets)}
    assert set(parts) == set(expected)
    for (s, t), (from_, to) in expected.items():
        found = moves(sources[s], targets[t], parts[s, t], "kv", ([5], [9]), tokens=16)
        for array in (1, 2):
            assert runs(found, array) == [
                (
                    5 * items[0] + token * heads(8, widths[0]) * 256 + from_,
                    9 * items[1] + token * heads(8, widths[1]) * 256 + to,
                    512,
                )
                for token in range(16)
            ]


def test_the_worked_example_of_one_token() -> None:
    sources, targets = kv_instance("p", 8, 4), kv_instance("d", 8, 2)
    part = next(part for part in plan.route(sources, targets) if part.source == 3)
    found = moves(sources[3], targets[1], part, "kv", ([5], [9]), tokens=16)
    assert runs(found, 1)[3] == (42496, 151040, 512)


def test_more_ranks_than_heads_hold_the_same_head() -> None:
    """T = 4: neighbours replicate, and division maps them, not the remainder."""
    down = plan.route(kv_instance("p", 4, 8), kv_instance("d", 4, 2))
    writers: dict[tuple[int, str], dict[int, int]] = {}
    for part in down:
        for share in part.shares:
            for box in share.boxes:
                for name in share.buffers:
                    for head in range(box.start[0], box.stop[0]):
                        assert writers.setdefault((part.target, name), {}).setdefault(head, part.source) == part.source
    assert set(writers) == {(t, f"layers.0.{kv}") for t in (0, 1) for kv in "kv"}
    for (target, _), owners in writers.items():
        assert set(owners) == {2 * target, 2 * target + 1}
        assert all(source // 2 == head for head, source in owners.items())

    up = {(part.source, part.target): part for part in plan.route(kv_instance("p", 4, 2), kv_instance("d", 4, 8))}
    assert set(up) == {(d // 4, d) for d in range(8)}
    sources, targets = kv_instance("p", 4, 2), kv_instance("d", 4, 8)
    for d in range(8):
        found = moves(sources[d // 4], targets[d], up[d // 4, d], "kv", ([0], [0]), tokens=16)
        # d0, d1 <- source head 0; d2, d3 <- source head 1
        assert {s % 512 for s, _, _ in runs(found, 1)} == {d % 4 // 2 * 256}


@pytest.mark.parametrize(
    ("tokens", "window", "page", "prefix", "start", "pages"),
    [
        (1000, 128, 64, 0, 832, 3),
        (1000, 128, 64, 960, 960, 1),
        (1000, 128, 1, 0, 872, 128),
        (100, 128, 64, 0, 0, 2),
        (1024, 128, 64, 0, 896, 2),
        (1000, 4096, 64, 512, 512, 8),
        (1151, 128, 64, 0, 960, 3),
        (1152, 128, 64, 0, 1024, 2),
    ],
)
def test_windows_begin_at_the_page_that_they_reach_into(
    tokens: int, window: int, page: int, prefix: int, start: int, pages: int
) -> None:
    arrays = {1: (pointer(1, 200, page, 1, 1), pointer(2, 200, page, 1, 1))}
    component = state.window_pages(arrays, heads=1, window=window).component
    assert plan.required_span(component, tokens, prefix) == (max(prefix, tokens - window, 0), tokens)
    items = plan.required(component, tokens, prefix, list(range(pages)))
    assert (items.first * page, len(items.ids)) == (start, pages)
    # Prefill gives its pages of the window, and the rest of it where it does not know of a prefix.
    assert plan.pushed(component, tokens, prefix, (0, tokens), list(range(pages))).first * page == start


def test_windows_pair_by_position_and_not_from_the_head() -> None:
    """Prefill still holds page 15; trimming both lists from their heads would put each page one off."""
    p, d = (
        describe(
            name, state.window_pages({0: (pointer(1, 20, 64, 1, 1), pointer(2, 20, 64, 1, 1))}, heads=1, window=128)
        )
        for name in "pd"
    )
    (part,) = plan.route([p], [d])
    found = moves(p, d, part, "swa", (Pages([5, 9, 7], 15 * 64), [1, 3]), tokens=1152)
    assert runs(found, 1) == [(9 * 64, 1 * 64, 64), (7 * 64, 3 * 64, 64)]


def names(layers: list[int]) -> list[str]:
    return [f"layers.{layer}.{part}" for part in "kv" for layer in layers]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (
            [7, 11, 36],
            [3, 7, 11, 36],
            # keys 7, 11, 36, then values; the lists of the field, with a draft in its band
            [(0, 1), (1, 2), (2, 3), (3, 5), (4, 6), (5, 7)],
        ),
        ([4, 5, 6], [0, 1, 2, 4, 5, 6], [(0, 3), (1, 4), (2, 5), (3, 9), (4, 10), (5, 11)]),
        ([6, 4, 5], [5, 4, 6], [(0, 2), (1, 1), (2, 0), (3, 5), (4, 4), (5, 3)]),
    ],
)
def test_layers_pair_by_name(source: list[int], target: list[int], expected: list[tuple[int, int]]) -> None:
    rest = [layer for layer in target if layer not in source]
    d = describe("d", keys(target, 4, 2, 1, 3, heads=1))
    stages = [describe("p", keys(source, 4, 2, 1, 3, heads=1), rank=0, ranks=1 + bool(rest))]
    if rest:
        stages.append(describe("p", keys(rest, 4, 2, 1, 3, heads=1), rank=1, ranks=2))
    plan.match(stages, [d])
    part = next(part for part in plan.route(stages, [d]) if part.source == 0)
    found = moves(stages[0], d, part, "kv", ([1], [2]), tokens=2)
    assert sorted((at(s).array - 1, at(t).array - 1) for s, t, _ in found) == expected
    assert {(at(s).offset, at(t).offset, n) for s, t, n in found} == {(6, 12, 6)}


@pytest.mark.parametrize("stages", [(3, 2), (24, 24, 23, 23), (1, 4, 2), (5,)])
def test_uneven_stages_put_values_where_they_belong(stages: tuple[int, ...]) -> None:
    """Guessing the halves of the list from its length puts V of stage 0 into K of others."""
    depth = sum(stages)
    firsts = [sum(stages[:n]) for n in range(len(stages))]
    d = describe("d", keys(range(depth), 2, 1, 1, 3, heads=1))
    sources = [
        describe("p", keys(range(first, first + n), 2, 1, 1, 3, heads=1), rank=rank, ranks=len(stages))
        for rank, (first, n) in enumerate(zip(firsts, stages, strict=True))
    ]
    seen = set()
    for part in plan.route(sources, [d]):
        n, first = stages[part.source], firsts[part.source]
        for s, t, _ in moves(sources[part.source], d, part, "kv", ([0], [1]), tokens=1):
            half, place = divmod(at(s).array - 1, n)
            assert at(t).array - 1 == half * depth + first + place
            seen.add(at(t).array)
    assert seen == set(range(1, 2 * depth + 1))


def test_prefix_and_chunks_name_the_same_pages() -> None:
    p, d = (describe(name, state.mla_pages({0: pointer(1, 99, 16, 1)})) for name in "pd")
    (part,) = plan.route([p], [d])
    compiled = plan.compile_pair(p, d, part).components["kv"]
    tokens, prefix = 100, 32
    wanted = plan.required(compiled.target, tokens, prefix, [40, 41, 42, 43, 44])
    assert (wanted.first, len(wanted.ids)) == (2, 5)
    owed = plan.due(compiled.source, compiled.target, tokens, prefix)
    assert (owed.first, owed.last) == (2, 7)
    found = []
    for span, ids in (((0, 48), [10, 11, 12]), ((48, 80), [13, 14]), ((80, 100), [15, 16])):
        items = plan.pushed(compiled.source, tokens, None, span, ids)
        for batch in plan.plan_move(compiled, items, wanted, owed).blocks():
            found += list(zip(batch.source.tolist(), batch.target.tolist(), batch.nbytes.tolist(), strict=True))
    # Pages 0 and 1 stay; page 2 + k of the request goes into item 40 + k.
    assert [((s - STEP) // 16, (t - STEP) // 16, n // 16) for s, t, n in found] == [
        (12, 40, 1),
        (13, 41, 2),
        (15, 43, 2),
    ]


def test_chunks_of_a_prompt_that_decode_has_the_beginning_of() -> None:
    """§7.6: chunks that end at 512, 700 and 1000 of a prompt, each rounded down to a page; decode holds 256."""
    component = describe("p", state.mla_pages({0: pointer(1, 99, 64, 1)})).components[0]
    assert len(plan.required(component, 1000, 256, range(12)).ids) == 12
    slices = []
    for a, b in ((256, 512), (512, 700 // 64 * 64), (700 // 64 * 64, 1000)):
        pages = plan.indices_of(component, 1000, 256, pages=range(16))
        first = plan.pushed(component, 1000, 256, (a, b), pages[(a - 256) // 64 : -(-(b - 256) // 64)])
        slices.append((first.first - 4, first.first - 4 + len(first.ids)))
    assert slices == [(0, 4), (4, 6), (6, 12)]


@pytest.mark.parametrize("source", [1, 2, 4, 8])
@pytest.mark.parametrize("target", [1, 2, 4, 8])
@pytest.mark.parametrize("stages", [1, 2])
def test_who_talks_to_whom(source: int, target: int, stages: int) -> None:
    """§4.4: whom each decode rank contacts, and from how many it waits for an end."""
    layers = [range(2 * stage, 2 * stage + 2) for stage in range(stages)]
    p = [
        describe("p", keys(layers[n // source], 4, 2, 8 // source, 3, heads=8, tp=(n % source, source)), rank=n,
                 ranks=source * stages)
        for n in range(source * stages)
    ]  # fmt: skip
    depth = range(2 * stages)
    d = ranks("d", target, lambda rank: keys(depth, 4, 2, 8 // target, 3, heads=8, tp=(rank, target)))
    real = {(part.source, part.target) for part in plan.route(p, d) if part.shares}
    group = max(source // target, 1)
    for rank in range(target):
        first = rank * group if source > target else rank // (target // source)
        contacted = {stage * source + first + n for stage in range(stages) for n in range(group)}
        assert {s for s, t in real if t == rank} == contacted
    assert all(sum(s == n for s, _ in real) == max(target // source, 1) for n in range(source * stages))
