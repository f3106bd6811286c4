"""What people deploy starts, and the two sides of it fit: public recipes for prefill and decode.

vLLM's own parser reads the flags, its own planner lays out the caches of a few layers of each kind, the adapter
describes them, and the core compares what the two servers hold. See `support/recipes.py` for what is made by hand.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm.entrypoints.common.cli_args", reason="the parser of vLLM's newest release reads the recipes")

from support.deployed import DEPLOYED, DRAFTS
from support.families import FAMILIES
from support.planned import plan
from support.recipes import ROLES, Recipe, config_of, model_of, parsed, read
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from statelink import state
from statelink.errors import StatelinkError
from statelink.plan import match
from statelink_vllm.connector import check_server, describe_cache, read_options
from statelink_vllm.plugin import register

if TYPE_CHECKING:
    from pathlib import Path

RECIPES = 168
MOST_REFUSED = 3

REFUSED = {
    "dsv4.c4.index": "one server has an index in FP4 and the other in FP8, whose pages have other sizes",
    "sleep mode": "vLLM asks each connector, and MooncakeStoreConnector says no",
}
"""What reasons name, and why nothing could move."""

RAN = {
    "MiniMax-M3": "MiniMax-M3 in FP8",
    "DeepSeek-V4": "DeepSeek V4",
    "Kimi-K3": "Kimi-Linear",
    "Kimi-K2.x": "DeepSeek V3",
    "DeepSeek-R1": "DeepSeek V3",
    "Qwen3-32B": "llama",
}
"""For each model of the recipes, the tiny one with its kinds of layers that ran as whole engines: in `test_deployed`,
`test_families` or, the dense one, in `test_engines`."""

DRAFTED = {
    ("MiniMax-M3", "eagle3"): "EAGLE3 with MiniMax-M3",
    ("DeepSeek-V4", "mtp"): "MTP of DeepSeek V4",
    ("Kimi-K3", "dspark"): "vLLM has DSpark for Kimi-K3 for NVIDIA's GPUs alone",
}
"""The same for their drafts, in `test_speculation`; or why none ran."""


@pytest.fixture(scope="module")
def refused(configuration: Path) -> dict[str, int]:
    """How many recipes each reason refuses."""
    register()
    found: Counter[str] = Counter()
    known: dict[str, str] = {}
    for recipe in read():
        key = repr(recipe)
        if key not in known:
            known[key] = _why(recipe, configuration)
        found[known[key]] += recipe.number
    del found[""]
    return dict(found)


def _why(recipe: Recipe, configuration: Path) -> str:
    """Why a recipe is refused; empty if it is not."""
    sides = [parsed(flags) for flags in recipe.sides]
    try:
        for args in sides:
            _check(args)
        match(*(_inventories(role, recipe.model, args, configuration) for role, args in zip(ROLES, sides, strict=True)))
    except (StatelinkError, ValueError) as error:
        return str(error)
    return ""


def _check(args: Any) -> None:
    """What vLLM and the adapter check when a server starts."""
    given = args.kv_transfer_config
    config: KVTransferConfig = given if isinstance(given, KVTransferConfig) else KVTransferConfig(**given)
    children = [config]
    if config.kv_connector == "MultiConnector":
        children = [KVTransferConfig(**each) for each in config.kv_connector_extra_config["connectors"]]
    ours = [each for each in children if each.kv_connector == "StatelinkConnector"]
    assert len(ours) == 1
    check_server(config_of(args), read_options(ours[0].kv_role, ours[0].kv_connector_extra_config))
    assert all(KVConnectorFactory.supports_hma_config(each) for each in children)
    if args.enable_sleep_mode:
        for each in children:
            if not KVConnectorFactory.get_connector_class(each).supports_sleep_mode(each):
                raise ValueError(f"{each.kv_connector} does not support sleep mode")


def _inventories(role: str, model: str, args: Any, configuration: Path) -> list[Any]:
    planned, width = model_of(model, args)
    made = []
    for rank in range(width):
        cache, known = plan(configuration, planned, rank, width)
        components, _ = describe_cache(cache.config, cache.tensors, known)
        made.append(state.describe(role, components, rank=rank, ranks=width, axes={"tp": (rank, width)}))
    return made


def test_they_are_all_there() -> None:
    assert sum(recipe.number for recipe in read()) == RECIPES


def test_hardly_any_is_refused(refused: dict[str, int]) -> None:
    shown = "\n".join(f"{count}: {why[:600]}" for why, count in refused.items())
    assert sum(refused.values()) <= MOST_REFUSED, shown
    assert all(any(what in why for what in REFUSED) for why in refused), shown


def test_each_model_has_run_and_each_kind_of_drafts_has_or_cannot() -> None:
    recipes = read()
    assert {recipe.model for recipe in recipes} == RAN.keys()
    assert set(RAN.values()) <= {*DEPLOYED, *FAMILIES, "llama"}
    drafts = {
        (recipe.model, json.loads(flags["speculative-config"])["method"])
        for recipe in recipes
        for flags in recipe.sides
        if "speculative-config" in flags
    }
    assert drafts == DRAFTED.keys()
    assert all(kind in DRAFTS or "vLLM" in kind for kind in DRAFTED.values())


def test_a_flag_that_vllm_does_not_know_is_found() -> None:
    with pytest.raises(SystemExit):
        parsed({"a-flag-of-no-version": 1})


def test_servers_that_differ_do_not_fit(configuration: Path) -> None:
    """So that a recipe could be refused at all."""
    recipe = next(each for each in read() if each.model == "DeepSeek-V4")
    flags = {**recipe.sides[0], "speculative-config": '{"method": "mtp", "num_speculative_tokens": 1}'}
    other = {key: value for key, value in flags.items() if key != "speculative-config"}
    assert "draft." in _why(Recipe(1, recipe.model, (flags, other)), configuration)
