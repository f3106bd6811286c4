"""Public recipes for prefill and decode, and what they stand for: vLLM's options, and the caches of their models.

``recipes.json`` has what public recipes start vLLM with: a line for each way to start the two servers, with the number
of recipes that do so. Left out are hosts, paths and variables of the environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from .planned import MODELS, Planned

__all__ = ["ROLES", "Recipe", "config_of", "model_of", "parsed", "read"]

ROLES = "prefill", "decode"
RENAMED: dict[tuple[str, Any], dict[str, Any]] = {
    ("use_fp4_indexer_cache", True): {"indexer_kv_dtype": "mxfp4"},
    ("use_trtllm_ragged_deepseek_prefill", True): {"mla_prefill_backend": "TRTLLM_RAGGED"},
}
"""Keys of ``--attention-config`` that the installed vLLM does not know, and what it calls them."""

PLAIN = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
OWN = {"backend": "nixl", "vllm": {"allow": ["cuda"]}}


class Recipe(NamedTuple):
    """One way to start the two servers.

    Attributes:
        number: Recipes that do so.
        model: The model.
        sides: The flags of prefill and of decode.
    """

    number: int
    model: str
    sides: tuple[Mapping[str, Any], Mapping[str, Any]]


def read() -> list[Recipe]:
    """Every recipe."""
    rows = json.loads((Path(__file__).parent / "recipes.json").read_text())
    return [Recipe(row["count"], row["model"], (row["prefill"], row["decode"])) for row in rows]


def parsed(flags: Mapping[str, Any]) -> Any:
    """What vLLM's own parser makes of a side's flags, with Statelink in place of NIXL."""
    line = ["--model", "any"]
    flags = {"kv-transfer-config": PLAIN, **flags}  # an orchestrator adds it
    for flag, value in flags.items():
        if flag == "kv-transfer-config":
            line += [f"--{flag}", json.dumps(_with_statelink(json.loads(value)))]
        elif flag == "attention-config":
            renamed = [RENAMED.get(pair, dict([pair])) for pair in json.loads(value).items()]
            line += [f"--{flag}", json.dumps({key: each for pair in renamed for key, each in pair.items()})]
        elif isinstance(value, bool):
            line.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            line += [f"--{flag}", str(value)]
    return make_arg_parser(FlexibleArgumentParser()).parse_args(line)


def _with_statelink(given: dict[str, Any]) -> dict[str, Any]:
    """The same configuration, with Statelink instead of NIXL's connector."""
    if given["kv_connector"] == "MultiConnector":
        children = [_with_statelink(each) for each in given["kv_connector_extra_config"]["connectors"]]
        return {**given, "kv_connector_extra_config": {"connectors": children}}
    if given["kv_connector"] != "NixlConnector":
        return given
    kept: dict[str, Any] = {
        key: given[key] for key in ("kv_role", "engine_id", "kv_load_failure_policy") if key in given
    }
    return {**kept, "kv_connector": "StatelinkConnector", "kv_connector_extra_config": OWN}


def config_of(args: Any) -> Any:
    """What the adapter reads of a ``VllmConfig``, on a GPU."""
    multimodal = None if args.language_model_only else SimpleNamespace(mm_processor_cache_gb=args.mm_processor_cache_gb)
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type="cuda"),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=args.prefill_context_parallel_size),
        scheduler_config=SimpleNamespace(policy=args.scheduling_policy),
        model_config=SimpleNamespace(multimodal_config=multimodal, enable_sleep_mode=args.enable_sleep_mode),
        cache_config=SimpleNamespace(enable_prefix_caching=args.enable_prefix_caching is not False),
        kv_transfer_config=args.kv_transfer_config,
    )


def model_of(model: str, args: Any) -> tuple[Planned, int]:
    """The layers of a side's model on a rank, a few of each kind, and the width of tensor parallelism."""
    width, block = args.tensor_parallel_size, args.block_size
    given: dict[str, Any] = {} if block is None else {"block": block}
    attention = json.loads(args.attention_config) if isinstance(args.attention_config, str) else args.attention_config
    attention = attention if isinstance(attention, dict) else vars(attention)
    drafts = args.speculative_config is not None
    bytewise = args.kv_cache_dtype.startswith("fp8")
    if model == "MiniMax-M3":
        keys = attention.get("indexer_kv_dtype") == "fp8"
        made = MODELS["minimax"](width, mtp=int(drafts), quantised=bytewise, index_bytes=keys, **given)
    elif model == "DeepSeek-V4":
        name = str(getattr(attention.get("backend"), "name", attention.get("backend")))
        plain, fp4 = name.startswith("FLASHINFER"), attention.get("indexer_kv_dtype") == "mxfp4"
        made = MODELS["v4"](width, packed=not plain, mtp=int(drafts), fp4=fp4, **given)
    elif model == "Kimi-K3":
        size = args.decode_context_parallel_size
        made = MODELS["latent"](width, quantised=bytewise, states=True, drafts=int(drafts), dcp=size, **given)
    elif model == "Qwen3-32B":
        made = MODELS["dense"](width, **given)
    else:
        assert model in ("Kimi-K2.x", "DeepSeek-R1"), model
        made = MODELS["latent"](width, quantised=bytewise, **given)
    return made, width
