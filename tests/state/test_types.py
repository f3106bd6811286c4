"""State types as data."""

from __future__ import annotations

from typing import Any

import pytest

from statelink.errors import StateError
from statelink.state import Coverage, IndexSpace, StateType, register_state_type, state_type, state_types

BUILT_IN = [kind for kind in state_types() if kind.name.isidentifier()]


@pytest.mark.parametrize("kind", BUILT_IN, ids=lambda kind: kind.name)
def test_a_built_in_type_says_what_it_is_and_agrees_with_itself(kind: StateType) -> None:
    """Which positions each covers, and how its items are named, is the affair of the planner's oracle."""
    assert kind.doc
    assert kind.positional is (kind.coverage is not Coverage.REQUEST)
    assert kind.positional is (kind.index in (IndexSpace.PAGE, IndexSpace.RING))
    assert state_type(kind.name) is kind
    assert all(state_type(alias) is kind for alias in kind.aliases)
    # A prefix that decode holds ends between two items of what it has of it.
    assert kind.aligned is (kind.coverage is Coverage.SUFFIX and not kind.complete)
    assert kind.with_last is (kind.name == "aux"), "engines write metadata after everything else"


def test_the_list_has_each_type_once_in_order() -> None:
    names = [kind.name for kind in state_types()]
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    assert state_type("nsa") is state_type("dsa")
    assert "nsa" not in names


def new(name: str = "tests.ring", **fields: Any) -> StateType:
    return StateType(**{"name": name, "index": IndexSpace.SLOT, "coverage": Coverage.REQUEST, **fields})


def test_a_third_partys_type_is_known_once_registered() -> None:
    made = new("tests.known", aliases=("tests.alias",))
    register_state_type(made)
    register_state_type(new("tests.known", aliases=("tests.alias",)))
    assert state_type("tests.known") is state_type("tests.alias")
    assert made in state_types()


@pytest.mark.parametrize(
    "other",
    [
        new("kv"),
        new("tests.other", aliases=("kv",)),
        new("nsa"),
        new("tests.other", aliases=("tests.free", "nsa")),
    ],
)
def test_a_name_that_is_taken_cannot_be_redefined(other: StateType) -> None:
    with pytest.raises(StateError, match=r"state type name '(kv|nsa)' is taken: it belongs to type '(kv|dsa)'"):
        register_state_type(other)
    assert state_type("kv").coverage is Coverage.SUFFIX
    # Nothing of a refused type stays behind.
    for name in ("tests.other", "tests.free"):
        with pytest.raises(StateError):
            state_type(name)


def test_an_unknown_type_lists_the_known_ones_and_guesses() -> None:
    with pytest.raises(StateError) as caught:
        state_type("mambo")
    assert caught.value.code == "state.unknown_type"
    assert str(caught.value).startswith("no state type named 'mambo': known types: aux, ")
    assert caught.value.hint == "did you mean 'mamba'?"
    with pytest.raises(StateError) as caught:
        state_type("zzzzzz")
    assert "statelink_state_types" in caught.value.hint


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": ""}, "a state type needs a name"),
        (
            {"index": IndexSpace.PAGE},
            "state type 'tests.ring' has index space 'page' but coverage 'request'",
        ),
        (
            {"coverage": Coverage.SUFFIX},
            "state type 'tests.ring' has index space 'slot' but coverage 'suffix'",
        ),
        (
            {"index": IndexSpace.ROW, "coverage": Coverage.WINDOW},
            "state type 'tests.ring' has index space 'row' but coverage 'window'",
        ),
    ],
)
def test_a_type_that_contradicts_itself_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(StateError) as caught:
        new(**fields)
    assert str(caught.value).startswith(text)
