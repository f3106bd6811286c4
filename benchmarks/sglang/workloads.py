"""The workloads, as SGLang's own pools on the CPU, and the requests that are played over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

PAGE, HEADS, DIM = 16, 8, 64
"""Pages of 16 KiB of keys and as many of values, in 16 bits."""
SEED, FILL = 7, 0xA5


class Workload(NamedTuple):
    """What a request has.

    Attributes:
        layers: Layers of full attention.
        pages: Pages of a request.
        in_order: Whether its pages lie one behind the other.
        window: Pages of a request's window; 0 if no layers have one.
        recurrent: Recurrent layers.
        dim: Size of a head.
        about: In words.
        small: Pages of one more request, which is small; 0 if there is none.
    """

    layers: int
    pages: int
    in_order: bool
    window: int
    recurrent: int
    dim: int
    about: str
    small: int = 0


WORKLOADS = {
    "A": Workload(4, 64, False, 0, 4, DIM, "4 layers, 64 random pages, 4 recurrent layers"),
    "A-window": Workload(4, 64, False, 16, 0, DIM, "4 layers, 64 random pages, 4 layers with a window of 16 pages"),
    "B": Workload(32, 512, False, 0, 0, DIM, "32 layers, 512 random pages"),
    "C": Workload(32, 512, True, 0, 0, DIM, "32 layers, 512 pages in order"),
    "E": Workload(2, 2, False, 0, 1, DIM // 2, "2 layers, 2 pages of 8 KiB, 1 recurrent layer"),
    "2x512": Workload(32, 512, False, 0, 0, DIM, "32 layers, 512 random pages, and 1 page", 1),
    "8x64": Workload(32, 64, False, 0, 0, DIM, "32 layers, 64 random pages, and 1 page", 1),
}


def make(name: str, in_flight: int) -> Any:
    """Pools with space for so many requests at once, and a quarter more. In a process with SGLang."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from support.pools import listed

    given = WORKLOADS[name]
    common: dict[str, Any] = {
        "size": given.pages * in_flight * 5 // 4 * PAGE,
        "page_size": PAGE,
        "dtype": torch.bfloat16,
        "head_num": HEADS,
        "head_dim": given.dim,
        "device": "cpu",
    }
    rows = in_flight + 1
    if given.recurrent:
        pool, requests = _hybrid(given, rows, common)
        return listed(pool, requests, given.layers + given.recurrent, heads=HEADS, rows=rows)
    if given.window:
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        pool = SWAKVPool(
            size_swa=given.window * in_flight * 4 * PAGE,
            full_attention_layer_ids=list(range(given.layers)),
            swa_attention_layer_ids=list(range(given.layers, 2 * given.layers)),
            **common,
        )
        return listed(pool, None, 2 * given.layers, heads=HEADS, window=given.window * PAGE, rows=rows)
    pool = MHATokenToKVPool(layer_num=given.layers, enable_memory_saver=False, **common)
    return listed(pool, None, given.layers, heads=HEADS, rows=rows)


def _hybrid(given: Workload, rows: int, common: dict[str, Any]) -> tuple[Any, Any]:
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool

    large = given.pages > 2  # 256 KiB of state and 15 KiB of convolution, or 8 and 3
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=2048 if large else 256,
        n_groups=8,
        num_heads=32 if large else 8,
        head_dim=64 if large else 32,
        state_size=32 if large else 8,
        conv_kernel=4,
    )
    layers = list(range(given.layers, given.layers + given.recurrent))
    requests = HybridReqToTokenPool(
        size=rows,
        mamba_size=rows,
        mamba_spec_state_size=rows,
        max_context_len=PAGE * given.pages,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=layers),
        mamba_layer_ids=layers,
        enable_mamba_extra_buffer=False,
        speculative_num_draft_tokens=None,
        enable_overlap_schedule=False,
    )
    pool = HybridLinearKVPool(
        full_attention_layer_ids=list(range(given.layers)), mamba_pool=requests.mamba_pool, **common
    )
    return pool, requests


class Slot(NamedTuple):
    """The memory of one request on one side."""

    pages: npt.NDArray[np.int32]
    states: list[Any]
    row: int

    def items(self, part: str, kinds: list[str]) -> npt.NDArray[np.int64]:
        """Its items of ``kv``, ``aux`` or a state type."""
        if part == "kv":
            return self.pages.astype(np.int64)
        return np.array([self.row]) if part == "aux" else np.ravel(self.states[kinds.index(part)])


def slots(name: str, role: str, kinds: list[str], in_flight: int, counts: dict[str, int]) -> list[Slot]:
    """The memory of so many requests on one side, always the same for a role. The small one, if any, is the last.

    Args:
        name: The workload.
        role: ``prefill`` or ``decode``.
        kinds: The state types, in order.
        in_flight: How many.
        counts: Items of each part.
    """
    given = WORKLOADS[name]
    draw = np.random.default_rng([SEED, role == "decode"])
    free = 1 + draw.permutation(counts["kv"] - 1)
    window = 1 + draw.permutation(counts.get("swa", 2) - 1)
    made = []
    for number, count in enumerate([given.pages] * in_flight + [given.small] * bool(given.small)):
        first = number * given.pages
        pages = np.arange(1 + first, 1 + first + count) if given.in_order else free[first : first + count]
        states: list[Any] = [
            window[number * given.window : (number + 1) * given.window].astype(np.int64)
            if kind == "swa"
            else [np.array(1 + number, np.int32)]
            for kind in kinds
        ]
        made.append(Slot(pages.astype(np.int32), states, number))
    return made


def source(part: str, number: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """The bytes of a buffer on prefill. Decode makes them again, to compare."""
    draw = np.random.Generator(np.random.SFC64([SEED, number, *part.encode()]))
    return draw.integers(0, 256, shape, np.uint8)
