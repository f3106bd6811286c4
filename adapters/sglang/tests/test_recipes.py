"""What people deploy starts: the flags of public recipes for prefill and decode, through the adapter's own checks.

See `support/recipes.py` for what SGLang itself makes of the flags, and what is made by hand.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from support.newest import OLDER, WHY
from support.recipes import MODELS, ROLES, Recipe, Side, read, refusals, resolved, write_models

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = [pytest.mark.skipif(OLDER, reason=WHY), pytest.mark.smoke, pytest.mark.usefixtures("sglang_context")]

RECIPES = 328
MOST_REFUSED = 0.02

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "sglang.md"

REFUSED = {"attn_cp_size is 8": (1, "context parallelism")}
"""The beginning of each reason why recipes are refused: how many are, and what docs/sglang.md calls it."""


BY_SGLANG = "SGLang itself: "


class Started(NamedTuple):
    """What became of a side.

    Attributes:
        refused: Why it is refused, with the words that its recipe needs.
        bare: Why it is refused with no word at all.
        args: SGLang's `ServerArgs`; ``None`` if SGLang refuses it.
        state_types: What SGLang moves beside pages.
    """

    refused: list[str]
    bare: list[str]
    args: Any = None
    state_types: tuple[str, ...] = ()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Started]:
    """Each distinct side of the recipes, by its key."""
    models = write_models(tmp_path_factory.mktemp("recipes") / "models")
    return {side.key: _start(side, models) for side in _sides().values()}


def _sides() -> dict[str, Side]:
    return {side.key: side for recipe in read() for side in recipe.sides}


def _needs(side: Side) -> set[str]:
    return {"cuda", "nodes"} if side.nodes > 1 else {"cuda"}


def _start(side: Side, models: Path) -> Started:
    try:
        with resolved(side, models) as found:
            return Started(
                refusals(side, found, _needs(side)), refusals(side, found, ()), found.args, found.state_types
            )
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        said = [f"{BY_SGLANG}{error}"]
        return Started(said, said)


def _reasons(recipe: Recipe, started: dict[str, Started]) -> set[str]:
    """Why a recipe cannot start: what either side is refused for."""
    return {reason for side in recipe.sides for reason in started[side.key].refused}


def _table(recipes: Iterable[Recipe], started: dict[str, Started]) -> str:
    """How many recipes each reason refuses, and on which sides."""
    counts, roles = Counter[str](), Counter[tuple[str, str]]()
    for recipe in recipes:
        counts.update(dict.fromkeys(_reasons(recipe, started), recipe.number))
        for side in recipe.sides:
            roles.update({(reason, side.role): recipe.number for reason in started[side.key].refused})
    lines = [
        f"{count:5d}  ({', '.join(f'{role} {roles[reason, role]}' for role in ROLES)})  {reason.split('; {')[0]}"
        for reason, count in counts.most_common()
    ]
    return "\n".join(["recipes  refused for", *lines])


def test_what_people_deploy_is_accepted_with_the_words_cuda_and_nodes_alone(started: dict[str, Started]) -> None:
    recipes = read()
    assert sum(recipe.number for recipe in recipes) == RECIPES
    refused = [recipe for recipe in recipes if _reasons(recipe, started)]
    table = _table(refused, started)
    total = sum(recipe.number for recipe in refused)
    print(f"{total} of {RECIPES} recipes are refused\n{table}")
    counts = Counter[str]()
    for recipe in refused:
        for reason in _reasons(recipe, started):
            counts[next((known for known in REFUSED if reason.startswith(known)), reason)] += recipe.number
    assert counts == {reason: count for reason, (count, _) in REFUSED.items()}, table
    assert total <= MOST_REFUSED * RECIPES, table


def test_each_reason_is_documented() -> None:
    refusing = [line for line in DOCUMENTATION.read_text().splitlines() if re.search(r"\brefused\b.*\|$", line)]
    for reason, (_, name) in REFUSED.items():
        assert any(name in line for line in refusing), f"docs/sglang.md does not refuse {name}: {reason}"


def test_without_these_words_each_is_refused_by_them_alone(started: dict[str, Started]) -> None:
    asked = Counter[str]()
    for key, side in _sides().items():
        found = started[key]
        if found.args is None:
            continue  # the first test counts it
        more = set(found.bare) - set(found.refused)
        words = [re.findall(r'"allow": \["(\w+)"\]', reason) for reason in more]
        assert sorted(words) == sorted([word] for word in _needs(side)), side
        assert set(found.refused) <= set(found.bare)
        asked.update(_needs(side))
    assert asked["cuda"] > asked["nodes"] > 0


def test_a_model_has_the_state_that_is_known_of_it(started: dict[str, Started]) -> None:
    """Known from the models: latents, windows with compressed latents, an index beside latents, recurrent layers."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for key, side in _sides().items():
        if started[key].args is not None:
            found.setdefault(side.model, set()).add(started[key].state_types)
    window = ("swa", "c128_state")
    assert found == {
        "DeepSeek-R1": {()},
        "DeepSeek-V4": {window, (*window, "swa")},  # with a draft, whose window is of its own
        "GLM-5.x": {("dsa",)},
        "Qwen3-32B": {()},
        "Qwen3.5": {("mamba",)},
    }
    assert found.keys() == MODELS.keys()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_its_kind_runs_as_servers(name: str) -> None:
    module, case = MODELS[name].ran
    tests = Path(__file__).with_name(f"{module}.py").read_text()
    assert "pytest.mark.servers" in tests
    assert f'"{case}"' in tests or not case
