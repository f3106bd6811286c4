"""Public recipes for prefill and decode, and a server of each as SGLang makes it of the flags, up to the pools.

``recipes.json`` holds what public recipes for prefill and decode start SGLang with: a line for each way to start the
two servers, with the number of recipes that do so. Left out are hosts, paths, what has no effect on a transfer, and the
transfer backend, in whose place is Statelink. ``variables`` has the variables of prefill and of decode, by their place
in the first list.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

ROLES = "prefill", "decode"

RENAMED = {
    # SGLang bounds the graphs of prefill by another flag. The recipes mean those of decode.
    "cuda-graph-max-bs": "cuda-graph-max-bs-decode",
    "mamba-scheduler-strategy": "mamba-radix-cache-strategy",
}
"""Flags of the recipes that the installed SGLang does not know, and what it calls them."""

GPUS = {True: 4, False: 8}
"""GPUs of a node: with memory that is mapped across nodes (GB200, GB300), and otherwise."""

MAPPED = {"MC_FORCE_MNNVL", "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"}
"""Variables that are set where memory is mapped across nodes."""

BLACKWELL: dict[str, Any] = {
    "is_cuda": True,
    "is_blackwell": True,
    "is_sm100": True,
    "is_sm100_or_sm110": True,
    "is_sm90": False,
    "is_hopper_with_cuda_12_3": False,
    "device_sm": 100,
    "device_capability": (10, 0),
    "has_flashinfer": True,
}
"""What SGLang believes of the machine. Most recipes name kernels that only such a GPU has."""

LATENT = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "vocab_size": 512,
    "max_position_embeddings": 163840,
}
INDEXED = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32}


class Model(NamedTuple):
    """A model that recipes serve.

    Attributes:
        config: A tiny one of the same architecture.
        pools: The kind of its pools in `support.pools`, or ``v4``.
        ran: Which test runs servers with a model of this kind: its module, and a case in it, if there are several.
    """

    config: Mapping[str, Any]
    pools: str
    ran: tuple[str, str]


MODELS = {
    "DeepSeek-R1": Model(
        {**LATENT, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
        "mla",
        ("test_models", "deepseek"),
    ),
    "GLM-5.x": Model(
        {**LATENT, **INDEXED, "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"},
        "dsa",
        ("test_models", "sparse"),
    ),
    "DeepSeek-V4": Model(
        {
            **LATENT,
            **INDEXED,
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "num_key_value_heads": 1,
            "head_dim": 512,
            "compress_ratios": [0, 4, 128, 0],
            "sliding_window": 128,
        },
        "v4",
        ("test_deepseek_v4_servers", "deepseek-v4"),
    ),
    "Qwen3-32B": Model(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 512,
        },
        "mha",
        ("test_pair", ""),
    ),
    "Qwen3.5": Model(
        {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "text_config": {
                "model_type": "qwen3_5_moe_text",
                "hidden_size": 256,
                "num_hidden_layers": 4,
                "full_attention_interval": 4,
                "num_attention_heads": 32,
                "num_key_value_heads": 2,
                "head_dim": 256,
                "linear_num_value_heads": 64,
                "linear_num_key_heads": 16,
                "num_experts": 512,
                "vocab_size": 512,
            },
        },
        "gdn",
        ("test_models", "qwen-next"),
    ),
}


class Side(NamedTuple):
    """One of a recipe's two servers.

    Attributes:
        model: Of `MODELS`.
        role: ``prefill`` or ``decode``.
        flags: What it is started with, without the leading dashes.
        variables: Of its environment.
    """

    model: str
    role: str
    flags: Mapping[str, Any]
    variables: Mapping[str, str]

    @property
    def key(self) -> str:
        """The same for sides that start alike."""
        return json.dumps(self)

    @property
    def nodes(self) -> int:
        """Nodes that it needs. No recipe states them as a flag: whoever starts the server counts them so."""
        width = self._size("tp-size", "tensor-parallel-size") * self._size("pp-size", "pipeline-parallel-size")
        return math.ceil(width / GPUS[bool(MAPPED & self.variables.keys())])

    def _size(self, *names: str) -> int:
        return next((int(self.flags[name]) for name in names if name in self.flags), 1)


class Recipe(NamedTuple):
    """Recipes that start the same two servers.

    Attributes:
        number: How many there are.
        frontend: Who starts the servers and routes requests; ``None`` if the recipe leaves it open.
        sides: Prefill and decode.
    """

    number: int
    frontend: str | None
    sides: tuple[Side, Side]


class Resolved(NamedTuple):
    """A side as its first scheduler has it.

    Attributes:
        args: SGLang's `ServerArgs`.
        parallel: SGLang's ``get_parallel()``.
        disagg: SGLang's ``get_disagg()``.
        state_types: What SGLang moves beside pages.
    """

    args: Any
    parallel: Any
    disagg: Any
    state_types: tuple[str, ...]


def read() -> list[Recipe]:
    """The recipes."""
    found = json.loads(Path(__file__).parent.with_name("recipes.json").read_text())
    made = []
    for each in found["recipes"]:
        variables = [found["variables"][place] for place in each["variables"]]
        prefill, decode = (
            Side(each["model"], role, each[role], given) for role, given in zip(ROLES, variables, strict=True)
        )
        made.append(Recipe(each["count"], each["frontend"], (prefill, decode)))
    return made


def arguments(side: Side, models: Path) -> list[str]:
    """The command line of a side. ``models`` is what `write_models` has filled."""
    given = ["--model-path", str(models / side.model), "--device", "cuda", "--disaggregation-mode", side.role]
    given += ["--disaggregation-transfer-backend", "statelink", "--nnodes", str(side.nodes)]
    if side.flags.get("moe-a2a-backend") == "flashinfer":
        # The recipes choose one of the kernels that go with it by a flag that is left out here.
        given += ["--moe-runner-backend", "flashinfer_cutlass"]
    for name, value in side.flags.items():
        if value is not False:  # written out by recipes that have no flag for it
            given += [f"--{RENAMED.get(name, name)}", *([] if value is True else [str(value)])]
    return given


def write_models(folder: Path) -> Path:
    """Write a configuration for each of `MODELS`. There are no weights."""
    for name, model in MODELS.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(model.config))
    return folder


@contextlib.contextmanager
def resolved(side: Side, models: Path) -> Iterator[Resolved]:
    """Start a side up to its pools. Within the context, SGLang's configuration and variables are the side's.

    SGLang parses, resolves and projects the arguments itself. These things are made by hand: what it believes of the
    machine, the number of nodes, that the scheduler is the first one, and tiny pools in the machine's own memory. From
    the pools, SGLang itself lists the state.

    Raises:
        ValueError: SGLang refuses the flags or variables; also other errors of its own.
    """
    from sglang.srt.runtime_context import (
        SpawnRanks,
        create_context,
        get_disagg,
        get_parallel,
        get_spec,
        override_platform,
        use_context,
    )
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    with _as_on_a_gpu(), mock.patch.dict(os.environ, side.variables):  # also undoes what SGLang sets meanwhile
        with override_platform(**BLACKWELL):
            args = prepare_server_args(arguments(side, models))
            args.resolve_once()
            context = create_context(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        with use_context(context):
            algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
            draft = bool(algorithm.is_some() and algorithm.has_draft_kv())
            types = _state_types(MODELS[side.model].pools, draft)
            yield Resolved(args, get_parallel(), get_disagg(), types)


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    import torch

    with pytest.MonkeyPatch.context() as patch:
        # Some rules for single models ask torch for it, past SGLang's own facts about the machine.
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: BLACKWELL["device_capability"])
        patch.setattr(logging, "basicConfig", lambda **_: None)  # it would take pytest's handlers away
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


@functools.cache  # the flags of no recipe change it further
def _state_types(kind: str, draft: bool) -> tuple[str, ...]:
    from .deepseek_v4 import make_v4, switched
    from .pools import make

    if kind != "v4":
        return tuple(each.value for each in make(kind).kv_args.state_types)
    with switched("mtp" if draft else "plain") as variant:
        return tuple(each.value for each in make_v4(variant).kv_args.state_types)


def refusals(side: Side, found: Resolved, allow: Collection[str]) -> list[str]:
    """Each reason why the adapter refuses a side, as it states it. Within the context of `resolved`."""
    from statelink.errors import ConfigError
    from statelink_sglang.backend import Server, check_server

    server = Server(
        side.role,
        found.args,
        found.parallel,
        found.disagg,
        device="cuda:0",
        state_types=found.state_types,
    )
    try:
        check_server(server, allow)
    except ConfigError as error:
        return re.split(r"; (?!\{)", error.reason.cause)  # what follows a brace is how to allow it
    return []
