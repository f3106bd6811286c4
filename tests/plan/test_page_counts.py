"""Which numbers of tokens decode's numbers of pages leave open: against counting the pages of each number."""

from __future__ import annotations

from typing import Any

import pytest

from statelink import plan, state
from statelink.errors import RoomError
from statelink.plan import Pages, Tokens
from statelink.state import Component, Partition

from .small import pointer


def pages_of(page: int, **more: Any) -> Component:
    return state.mla_pages({0: pointer(1, 100, page, 1)}, name=f"of {page}", **more).component


WHOLE = state.whole_items({"scale": pointer(3, 100, 8)}, type="block_scale", page=8).component
WINDOW = state.kv_pages({0: (pointer(1, 100, 4, 1, 1), pointer(2, 100, 4, 1, 1))}, heads=1, window=7).component
CHUNKED = state.kv_pages(
    {0: (pointer(1, 100, 4, 1, 1), pointer(2, 100, 4, 1, 1))}, heads=1, attention_chunk=8
).component
SLOT = state.mamba_slots(conv={0: pointer(1, 10, 4, 2)}, ssm={}).component


def counts(components: list[Component], tokens: int, prefix: int) -> list[int]:
    """How many pages of each component must arrive, worked out position by position."""
    found = []
    for each in components:
        first = prefix if each.kind.coverage is state.Coverage.SUFFIX else 0
        found.append(len({position // each.page for position in range(first, tokens)}))
    return found


@pytest.mark.parametrize("components", [[pages_of(4)], [pages_of(8), pages_of(4)], [pages_of(4), WHOLE, SLOT]])
@pytest.mark.parametrize("prefix", [0, 8, 16])
def test_every_number_with_these_pages_and_no_other(components: list[Component], prefix: int) -> None:
    positional = [each for each in components if each.kind.positional]
    most = prefix + 40
    for tokens in range(max(prefix, 1), most):
        seen = counts(positional, tokens, prefix)
        alike = [other for other in range(max(prefix, 1), most + 8) if counts(positional, other, prefix) == seen]
        given = {each.name: range(count) for each, count in zip(positional, seen, strict=True)}
        assert plan.tokens_of(components, prefix, given) == Tokens(alike[0], alike[-1])
        for number in {alike[0], alike[-1]}:
            for each in positional:
                assert len(plan.required(each, number, prefix, given[each.name]).ids) == len(given[each.name])


@pytest.mark.parametrize(
    ("components", "prefix", "given", "code", "said"),
    [
        ([pages_of(4), pages_of(8)], 0, {"of 4": [0, 1, 2], "of 8": [0]}, "room.items", "9 to 12"),
        ([pages_of(4)], 0, {}, "room.items", "0 tokens"),
        ([pages_of(4)], 6, {"of 4": [0]}, "room.prefix", "inside a page"),
        ([pages_of(4), WINDOW], 0, {"of 4": [0, 1, 2], "swa": [0]}, "room.tokens", "'swa'"),
        ([pages_of(4), CHUNKED], 0, {"of 4": [0, 1, 2], "chunked_local": [0]}, "room.tokens", "'chunked_local'"),
        ([pages_of(4, partition=Partition("cyclic", 2, 0, 4))], 0, {}, "room.tokens", "'of 4'"),
        ([pages_of(4)], 0, {"of 4": [0, 1000]}, "room.indices", "1000"),
        ([pages_of(4)], 0, {"of 4": [0.5]}, "room.indices", "float64"),
    ],
)
def test_what_pages_cannot_say(components: list[Component], prefix: int, given: Any, code: str, said: str) -> None:
    with pytest.raises(RoomError, match=said) as caught:
        plan.tokens_of(components, prefix, given)
    assert caught.value.code == code


def test_pages_of_one_token_say_the_number() -> None:
    """Then it does not matter what depends on it."""
    assert plan.tokens_of([pages_of(1), WINDOW], 5, {"of 1": Pages([7, 8, 9], 5)}) == Tokens(8, 8)


def test_without_pages_any_number_is_possible() -> None:
    assert plan.tokens_of([SLOT], 0, {"mamba": [1]}) == Tokens(1, plan.MAX_TOKENS)
