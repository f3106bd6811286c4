"""What the adapter refuses at the start of a server: what it cannot do, and what was never tested.

SGLang checks some combinations by the name of the backend, and raises itself. Here are the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from statelink.errors import ConfigError

from ._options import ALLOWED, VARIABLE

__all__ = ["Server", "check_server"]


class Server(NamedTuple):
    """What of SGLang's configuration matters here.

    Attributes:
        role: ``prefill`` or ``decode``.
        args: SGLang's ``ServerArgs``.
        parallel: SGLang's ``get_parallel()``.
        disagg: SGLang's ``get_disagg()``.
        device: Where the pools are, such as ``cpu`` or ``cuda:0``.
        draft: Whether there is a draft model's pool.
    """

    role: str
    args: Any
    parallel: Any
    disagg: Any
    device: str
    draft: bool


def check_server(server: Server, allow: Iterable[str]) -> None:
    """Refuse what does not work, by name.

    Raises:
        ConfigError: Names all that must be changed.
    """
    refused = [*_impossible(server), *_untested(server, frozenset(allow))]
    if refused:
        raise ConfigError(
            f"this {server.role} server cannot use the transfer backend 'statelink'",
            cause="; ".join(refused),
            hint="change these options, or use another --disaggregation-transfer-backend",
        )


def _impossible(server: Server) -> Iterator[str]:
    parallel, disagg, args = server.parallel, server.disagg, server.args
    for name, most in (("pp_size", 1), ("attn_cp_size", 1), ("attn_dcp_size", 1), ("dp_size", 1), ("attn_dp_size", 1)):
        width = getattr(parallel, name, 1) or 1
        if width > most:
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
    if getattr(disagg, "disaggregation_decode_host_receive_threshold", 1) < 1:
        yield "--disaggregation-decode-host-receive-threshold is not supported"
    for variable, wanted in (
        ("SGLANG_DISAGG_STAGING_BUFFER", False),
        ("SGLANG_RUST_SERVER", False),
        ("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", True),
    ):
        given = os.environ.get(variable, "").strip().lower()
        if given and (given in ("1", "true", "yes", "on")) != wanted:
            yield f"the variable {variable} must not be {given}"


def _untested(server: Server, allow: frozenset[str]) -> Iterator[str]:
    found = {
        "cuda": server.device != "cpu",
        "overlap": not getattr(server.args, "disable_overlap_schedule", False),
        "draft": server.draft,
        "hicache": bool(getattr(server.args, "enable_hierarchical_cache", False)),
    }
    for word, there in found.items():
        if there and word not in allow:
            yield (
                f'{ALLOWED[word]} was not tested with Statelink; {{"sglang": {{"allow": ["{word}"]}}}} in {VARIABLE} '
                "allows it"
            )
