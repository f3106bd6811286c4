"""What the adapter refuses at the start of a server: what cannot be done, and what only hardware can show.

SGLang itself refuses some combinations by the name of the backend. This module refuses the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.environ import envs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from statelink.errors import ConfigError

from ._behaviour import BEHAVIOUR
from ._options import ALLOWED, VARIABLE

__all__ = ["Server", "check_server"]

TESTED_STATE = frozenset(
    {
        *("swa", "dsa", "mamba", "c128_state", "request_row", "block_scale", "qsa_pending", "qsa_compressed"),
        *("block_scale_swa", "dsa_tail", "minimax_index_k", "minimax_dense_kv"),
    }
)
"""State types with which the adapter is tested."""


class Server(NamedTuple):
    """The parts of SGLang's configuration that decide what is refused.

    Attributes:
        role: ``prefill`` or ``decode``.
        args: SGLang's ``ServerArgs``: what the operator gave, and what SGLang has made of it.
        parallel: SGLang's ``get_parallel()``.
        disagg: SGLang's ``get_disagg()``.
        device: Where the pools are, such as ``cpu`` or ``cuda:0``.
        state_types: What SGLang moves beside pages, such as ``swa``.
    """

    role: str
    args: Any
    parallel: Any
    disagg: Any
    device: str
    state_types: tuple[str, ...] = ()


def check_server(server: Server, allow: Iterable[str]) -> None:
    """Refuse what does not work, by name.

    Raises:
        ConfigError: Names all that must be changed.
    """
    server = server._replace(args=resolved_view(server.args))
    refused = [*_impossible(server), *_untested(server, frozenset(allow))]
    if refused:
        raise ConfigError(
            f"this {server.role} server cannot use the transfer backend 'statelink'",
            cause="; ".join(refused),
            hint="change these options, or use another --disaggregation-transfer-backend",
        )


def _impossible(server: Server) -> Iterator[str]:
    parallel, disagg, args = server.parallel, server.disagg, server.args
    for name in ("attn_cp_size", "attn_dcp_size"):
        width = getattr(parallel, name, 1) or 1
        if width > 1:
            yield f"{name} is {width}, and only 1 is supported"
    for name in ("enable_kv_cache_sharding", "enable_dsa_cache_layer_split", "enable_cp_tp_group_sharing"):
        if getattr(parallel, name, False):
            yield f"{name} is not supported"
    if getattr(args, "tokenizer_worker_num", 1) != 1:
        yield "--tokenizer-worker-num must be 1: SGLang loads no plugins in further tokenizer workers"
    for name in ("enable_unified_memory", "enable_hisparse"):
        if getattr(args, name, False):
            yield f"{name} is not supported"
    if getattr(disagg, "enable_pd_role_switch", False):
        yield "--enable-pd-role-switch is not supported"
    if getattr(disagg, "disaggregation_decode_allocation_policy", "early") != "early":
        yield "--disaggregation-decode-allocation-policy must be early"
    device_only = BEHAVIOUR.device_only
    if getattr(disagg, "disaggregation_decode_host_receive_threshold", device_only) != device_only:
        yield "--disaggregation-decode-host-receive-threshold is not supported"
    algorithm = getattr(args, "speculative_algorithm", None)
    if not _starts_a_draft(algorithm):
        yield f"--speculative-algorithm {algorithm}: SGLang's decode cannot start its draft from what prefill sends"
    for kind in server.state_types:
        if kind not in TESTED_STATE:
            yield f"state of the type {kind!r} is not supported"
    for variable, wanted in (
        ("SGLANG_RUST_SERVER", False),
        ("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", True),
        ("SGLANG_MM_SKIP_COMPUTE_HASH", False),  # without it, nobody can say which image a request has
    ):
        given = getattr(envs, variable).get()
        if given != wanted:
            yield f"the variable {variable} must not be {os.environ.get(variable, given)}"


def _starts_a_draft(algorithm: str | None) -> bool:
    """Whether SGLang's decode can go on with a request of prefill's. It asks the algorithm in the same way."""
    chosen = SpeculativeAlgorithm.from_string(algorithm)
    if isinstance(chosen, SpeculativeAlgorithm):
        return bool(chosen.is_none() or chosen.is_eagle() or chosen.is_dspark() or chosen.is_dflash())
    return bool(type(chosen).build_disagg_draft_input is not CustomSpecAlgo.build_disagg_draft_input)


def _untested(server: Server, allow: frozenset[str]) -> Iterator[str]:
    found = {
        "cuda": server.device != "cpu",
        "nodes": (getattr(server.parallel, "nnodes", 1) or 1) > 1,
    }
    for word, there in found.items():
        if there and word not in allow:
            yield (
                f"{ALLOWED[word]}: not tested with Statelink; "
                f'{{"sglang": {{"allow": ["{word}"]}}}} in {VARIABLE} allows it'
            )
