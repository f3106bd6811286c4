"""Layers with chunked local attention, over real links: of a request, what its next token attends to.

Every byte of both sides is looked at, so what need not arrive is seen not to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.helpers.fleet import Fleet
from tests.helpers.pools import Component, Kv

if TYPE_CHECKING:
    from tests.link.conftest import TwoEngines

pytestmark = pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")

CHUNK = 64
EDGES = [(1, 0), (63, 0), (64, 0), (65, 0), (100, 0), (127, 0), (128, 0), (129, 0), (200, 0)]
PREFIXES = [(100, 48), (100, 64), (100, 80), (128, 64), (200, 128), (200, 192)]


def pools(rank: int = 0, width: int = 1, *, page: int = 16, chunk: int = CHUNK, order: str = "nhd") -> list[Component]:
    """Full attention beside chunked local attention."""
    tp = rank, width
    chunked = Kv(name="chunked", layers=(4, 6), pages=30, heads=2, attention_chunk=chunk, page=page, order=order, tp=tp)
    return [Kv(layers=(5,), tp=tp), chunked]


@pytest.mark.parametrize(("tokens", "prefix"), [*EDGES, *PREFIXES])
def test_what_the_next_token_attends_to_arrives(two_engines: TwoEngines, tokens: int, prefix: int) -> None:
    Fleet(two_engines, [pools()], [pools()]).run(tokens, prefix)


@pytest.mark.parametrize(("sources", "targets"), [(2, 1), (1, 2), (4, 2)])
def test_between_unequal_widths_page_sizes_and_orders(two_engines: TwoEngines, sources: int, targets: int) -> None:
    fleet = Fleet(
        two_engines,
        [pools(rank, sources, page=8) for rank in range(sources)],
        [pools(rank, targets, page=32, order="hnd") for rank in range(targets)],
    )
    for tokens, prefix in (*EDGES[3:], (100, 96)):
        fleet.run(tokens, prefix)


@pytest.mark.parametrize("page", [8, 32])
def test_a_chunk_that_begins_inside_a_page(two_engines: TwoEngines, page: int) -> None:
    fleet = Fleet(two_engines, [pools(page=page, chunk=24)], [pools(chunk=24)])
    for tokens, prefix in ((95, 0), (95, 80), (96, 0), (97, 0), (120, 0)):
        fleet.run(tokens, prefix)


def test_pushes_of_a_part_of_the_prompt(two_engines: TwoEngines) -> None:
    """An engine pushes beside its forward pass. What a push lacks of the last chunk, a later one has."""
    fleet = Fleet(two_engines, [pools()], [pools()])
    for tokens, cuts in ((200, (96, 160)), (200, (192,)), (128, (64,)), (100, (80, 96))):
        fleet.run(tokens, cuts=cuts)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (pools(chunk=32), "chunked: group: 32 on decode, 64 on prefill"),
        ([pools()[0], Kv(name="chunked", layers=(4, 6), pages=30, heads=2)], "chunked: type: kv on decode"),
        (
            [pools()[0], Kv(name="chunked", layers=(4, 6), pages=30, heads=2, window=64)],
            "chunked: type: swa on decode, chunked_local on prefill",
        ),
    ],
    ids=["another chunk", "full attention", "a window"],
)
def test_other_attention_on_the_other_side_is_refused_by_name(
    two_engines: TwoEngines, theirs: list[Component], said: str
) -> None:
    prefill, decode = two_engines.open("prefill", pools()), two_engines.open("decode", theirs)
    assert said in decode.receive(50, prefill.address, 64, deadline=20).failed()
