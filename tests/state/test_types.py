"""State types as data."""

from __future__ import annotations

from typing import Any

import pytest

from statelink.errors import StateError
from statelink.state import Coverage, IndexSpace, StateType, register_state_type, state_type, state_types

ISSUE_2 = {
    "kv": (IndexSpace.PAGE, Coverage.SUFFIX),
    "swa": (IndexSpace.PAGE, Coverage.WINDOW),
    "dsa": (IndexSpace.PAGE, Coverage.SUFFIX),
    "mamba": (IndexSpace.SLOT, Coverage.REQUEST),
    "aux": (IndexSpace.ROW, Coverage.REQUEST),
}


def test_the_built_in_types_are_what_the_field_has() -> None:
    for name, (index, coverage) in ISSUE_2.items():
        kind = state_type(name)
        assert (kind.name, kind.index, kind.coverage) == (name, index, coverage)
        assert kind.positional is (coverage is not Coverage.REQUEST)
    assert state_type("nsa") is state_type("dsa")
    assert state_type("dsa").elide_empty
    assert not state_type("kv").elide_empty
    assert [name for name in ISSUE_2 if state_type(name).aligned] == ["kv", "dsa"]
    assert [kind.name for kind in state_types() if kind.with_last] == ["aux"]


def test_the_list_has_each_type_once_in_order_with_its_meaning() -> None:
    names = [kind.name for kind in state_types()]
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    assert set(ISSUE_2) <= set(names)
    assert "nsa" not in names
    assert all(kind.doc for kind in state_types() if kind.name in ISSUE_2)


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
