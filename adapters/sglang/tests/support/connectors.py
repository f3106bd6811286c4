"""A scheduler's manager without a scheduler: Statelink's, or one of SGLang's own, over real pools on the CPU.

SGLang's classes are used as they are. What a launcher and a scheduler would have set up is set up here.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .pools import Made

CONNECTORS = ("statelink", "nixl", "mooncake")
TCP_LIMITS = {
    "MC_FORCE_TCP": "1",
    "MOONCAKE_PROTOCOL": "tcp",
    # Mooncake's transport over TCP refuses more queued writes than these, and SGLang posts a whole chunk at once.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "60000",
}
"""What SGLang's Mooncake connector needs without RDMA."""


class Classes(NamedTuple):
    """What SGLang's schedulers make for one backend."""

    manager: Any
    sender: Any
    receiver: Any
    server: Any


def publish(role: str, connector: str, model: str, port: int, host: str = "127.0.0.1") -> tuple[Any, Classes]:
    """Publish SGLang's configuration as in a scheduler, and find the connector's classes. Once a process.

    Args:
        role: ``prefill`` or ``decode``.
        connector: What `--disaggregation-transfer-backend` says.
        model: The folder of a model; only its configuration is read.
        port: `--disaggregation-bootstrap-port`.
        host: Where prefill's servers listen.
    """
    if connector == "mooncake":
        os.environ.update(TCP_LIMITS)
    import torch

    torch.set_num_threads(1)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
    from sglang.srt.server_args import prepare_server_args

    given = prepare_server_args(
        [
            *("--model-path", model, "--device", "cpu", "--attention-backend", "torch_native", "--host", host),
            *("--page-size", "16", "--disaggregation-mode", role, "--disable-overlap-schedule"),
            *("--disaggregation-transfer-backend", connector, "--disaggregation-bootstrap-port", str(port)),
            *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
        ]
    )
    given.resolve_once()
    publish(given, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    get_parallel().override_permanently(pp_group=SimpleNamespace(world_size=1, rank_in_group=0, is_last_rank=True))
    kinds = KVClassType.MANAGER, KVClassType.SENDER, KVClassType.RECEIVER, KVClassType.BOOTSTRAP_SERVER
    return given, Classes(*(get_kv_class(TransferBackend(connector), kind) for kind in kinds))


def make_manager(role: str, connector: str, given: Any, classes: Classes, made: Made, port: int) -> Any:
    """The manager of one rank, as SGLang's queue makes it."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.runtime_context import get_disagg

    args, config = made.kv_args, made.pools.config
    layers, heads = config.num_hidden_layers, config.get_total_num_kv_heads()
    _complete(args, layers, heads)
    vars(config).update(
        hidden_size=64,
        vocab_size=512,
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
    )
    kind = classes.manager
    if connector == "nixl":
        args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)
        name_host_memory()
        kind = _with_prepared_state(kind)
    if connector == "mooncake":
        from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import init_mooncake_transfer_engine

        init_mooncake_transfer_engine(hostname="127.0.0.1", gpu_id=0, ib_device=None)
    queue = SimpleNamespace(
        token_to_kv_pool=made.pools.pages,
        draft_token_to_kv_pool=None,
        metadata_buffers=made.pools.metadata,
        transfer_queue=SimpleNamespace(deferred_kv_release_timeout=30.0),
        scheduler=SimpleNamespace(
            model_config=config,
            req_to_token_pool=made.pools.requests,
            sliding_window_size=made.pools.window,
            enable_overlap=False,
        ),
    )
    from statelink_sglang.backend import around_init_kv_manager  # imports SGLang's queues, after its plugins

    mode = DisaggregationMode.PREFILL if role == "prefill" else DisaggregationMode.DECODE
    with get_disagg().override(disaggregation_bootstrap_port=port):
        return around_init_kv_manager(lambda _: kind(args, mode, given, False), queue)


def _complete(args: Any, layers: int, heads: int) -> None:
    """What SGLang's queues add to `KVArgs` besides the buffers."""
    more: dict[str, Any] = {
        "engine_rank": 0,
        "pp_rank": 0,
        "system_dp_rank": None,
        "rust_http_port": None,
        "gpu_id": 0,
        "ib_device": None,
        "kv_cache_dtype_str": "bfloat16",
        "kv_head_num": heads,
        "total_kv_head_num": heads,
        "prefill_start_layer": 0,
        "prefill_end_layer": layers,
    }
    for name, value in more.items():
        setattr(args, name, value)


def name_host_memory() -> None:
    """SGLang names metadata rows and state as a GPU's memory to NIXL; on a CPU it is the host's."""
    import nixl._api as api

    if getattr(api.nixl_agent, "names_host_memory", False):
        return

    def kind(word: Any) -> Any:
        return "DRAM" if word == "VRAM" else word

    class Agent(api.nixl_agent):  # type: ignore[misc]
        names_host_memory = True

        def register_memory(self, descs: Any, mem_type: Any = None, *more: Any, **named: Any) -> Any:
            return super().register_memory(descs, kind(mem_type), *more, **named)

        def get_xfer_descs(self, descs: Any, mem_type: Any = None, *more: Any, **named: Any) -> Any:
            return super().get_xfer_descs(descs, kind(mem_type), *more, **named)

        def prep_xfer_dlist(self, agent: Any, descs: Any, mem_type: Any = None, *more: Any, **named: Any) -> Any:
            return super().prep_xfer_dlist(agent, descs, kind(mem_type), *more, **named)

    api.nixl_agent = Agent


def _with_prepared_state(manager: Any) -> Any:
    """SGLang prepares lists of state once for each peer, but only on a GPU. Take that faster way here, too."""
    from sglang.srt.disaggregation.nixl import conn

    class Prepared(manager):  # type: ignore[misc]
        def _prepared_state_component_indices(self, backend: str) -> frozenset[int]:
            types = self.kv_args.state_types or []
            return frozenset(number for number, kind in enumerate(types) if kind in conn._PREPARED_STATE_TYPES)

    return Prepared
