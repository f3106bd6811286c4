"""Describes what a scheduler holds, and compares it with what SGLang itself would have moved.

The description comes from the pools (`_pools.from_pools`). SGLang's own list, `KVArgs`, has addresses and
lengths only. The two must have the same buffers. A buffer that only one of them has is refused by name: that is how a
state type that SGLang adds later is noticed, instead of being left behind.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from statelink import state
from statelink.errors import StateError

from ._convolutions import Blocks, blocks_of
from ._pools import Element, Geometry, StateTensor, from_pools

__all__ = ["TAIL", "Pools", "StateLists", "describe_pools", "geometry_of", "names_of"]

TAIL = "dsa_tail"
"""The state type of which SGLang lists no items, but six numbers."""

Buffer = tuple[int, int, int]
"""Address, length in bytes, and bytes of one item."""

PAGES = {"kv", "dsv4"}
"""Types of state that SGLang addresses by the pages of the full pool."""
BESIDE = {"dsa", "minimax_index_k"}
"""Types of state that SGLang lists with the last chunk, and that have the same pages."""
BY_LAYERS = {"kv", "dsa", "minimax_index_k"}
"""Types of state that a layer's attention completes. The compressed pages of DeepSeek V4 are completed elsewhere."""


class Pools(NamedTuple):
    """The pools of one scheduler.

    Attributes:
        pages: The pool of the model's pages.
        draft: The pool of a draft model's pages, or ``None``.
        requests: The pool of request slots.
        metadata: SGLang's `MetadataBuffers`.
        config: SGLang's `ModelConfig`.
        window: Positions that sliding-window layers look back, as the scheduler counts them; 0 if there are none.
        tp: This rank and the width of attention TP.
        kind: Kind of the pools' memory: ``dram``, or a device with its number.
        rows_optional: Whether the other server may have no metadata rows.
        layers: The first layer of this pipeline stage, and one past its last; ``None`` if there is one stage.
        role: ``prefill`` or ``decode``.
    """

    pages: Any
    draft: Any
    requests: Any
    metadata: Any
    config: Any
    window: int
    tp: tuple[int, int]
    kind: str = "dram"
    rows_optional: bool = False
    layers: tuple[int, int] | None = None
    role: str = "prefill"

    @property
    def rows(self) -> bool:
        """Whether this rank has metadata rows.

        The last stage of prefill samples the first token, and fills the rows. Every stage of decode reads them.
        """
        return self.role == "decode" or self.layers is None or self.layers[1] == self.config.num_hidden_layers


class StateLists(NamedTuple):
    """How SGLang's lists of indices go with components.

    Attributes:
        pages: Components that are addressed by the pages of the full pool.
        states: For each of SGLang's state types, in order, its components. There are two if SGLang lists the draft's
            buffers behind the model's.
        whole: Those of ``states`` that cover positions: SGLang lists all of their items with the last chunk.
        beside: Those of ``whole`` that have the pages of the full pool, and as many: prefill sends each chunk of them
            beside the chunk's pages, and needs no list.
        layered: Components of which a forward pass of the model completes one layer after the other.
        layers: The model's layers of ``layered``.
    """

    pages: tuple[str, ...]
    states: tuple[tuple[str, ...], ...]
    whole: frozenset[str]
    beside: frozenset[str] = frozenset()
    layered: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()


def geometry_of(pools: Pools) -> Geometry:
    """The model's numbers, as the pools and the model's configuration state them."""
    pool, config = pools.pages, pools.config
    full = getattr(pool, "full_kv_pool", None) or pool
    latent = not hasattr(full, "head_num") or hasattr(full, "kv_lora_rank")
    more: dict[str, Any] = {}
    mapping = getattr(pool, "layers_mapping", None)
    if mapping is not None and hasattr(pool, "swa_kv_pool"):
        more["windowed"] = [mapping[layer][1] for layer in range(config.num_hidden_layers)]
        more["window"] = pools.window
        more["window_heads"] = _window_heads(pools)
    ratios = getattr(pool, "compression_ratios", None)
    if ratios is not None:
        more["window"] = pools.window
        more["request_ratio"] = 2 if 2 in ratios else 128
    states = getattr(pool, "mamba_pool", None) or getattr(pools.requests, "mamba_pool", None)
    if states is not None:
        recurrent = states.mamba_cache
        blocks: Blocks | None = []
        if _has_unnamed_blocks(states):
            blocks = blocks_of(config.hf_text_config, recurrent, pools.tp[1])
        if blocks is None:
            more["format"] = f"convolutions as TP {pools.tp[1]} cuts them"
        more["tensors"] = _state_tensors(recurrent, blocks or [])
    return Geometry(
        layers=config.num_hidden_layers,
        element=Element.of(full.dtype),
        page=pool.page_size,
        tp=pools.tp,
        stage=pools.layers or (0, config.num_hidden_layers),
        kv_heads=0 if latent else config.get_total_num_kv_heads(),
        kind=pools.kind,
        **more,
    )


def describe_pools(pools: Pools, kv_args: Any) -> tuple[list[Any], StateLists]:
    """The components of a rank, and how SGLang's lists of indices go with them.

    Raises:
        StateError: A pool cannot be described, or the description and ``kv_args`` have different buffers.
    """
    unfit = [*_unfit(pools.pages)]
    if unfit:
        raise StateError(
            f"{type(pools.pages).__name__} cannot be moved",
            cause="; ".join(unfit),
            hint="use another --disaggregation-transfer-backend with this model, or start it without that option",
        )
    geometry = geometry_of(pools)
    components = from_pools(pools.pages, pools.requests, pools.draft, geometry)
    if pools.rows:
        rows = _rows(pools.metadata, kv_args)
        components.append(state.aux_rows(rows, replicated=True, optional=pools.rows_optional, format=geometry.format))
    found = {each.component.name: each for each in components}
    names = names_of(kv_args.state_types)
    states = tuple((name, *([each] if (each := f"draft.{name}") in found.keys() - {*names} else [])) for name in names)
    wrong = [*_differences(found, states, kv_args), *_unlisted(pools, names)]
    if wrong:
        raise StateError(
            f"{type(pools.pages).__name__} holds other state than what SGLang would move",
            cause="; ".join(wrong),
            hint="use another --disaggregation-transfer-backend with this model",
        )
    listed = [name for each in states for name in each]
    pages = tuple(name for name in found if name not in listed and name != "aux")
    whole = frozenset(name for name in listed if state.state_type(found[name].component.type).positional)
    beside = frozenset(name for name in whole if found[name].component.type in BESIDE)
    layered = tuple(
        name
        for name in (*pages, *sorted(beside))
        if not name.startswith("draft.") and found[name].component.type in BY_LAYERS
    )
    layers = {buffer.layer for name in layered for buffer in found[name].component.buffers if buffer.layer is not None}
    return components, StateLists(pages, states, whole, beside, layered, tuple(sorted(layers)))


def names_of(state_types: Sequence[Any]) -> tuple[str, ...]:
    """The component of each of SGLang's state types. A type that comes twice is the draft's the second time."""
    names: list[str] = []
    for kind in state_types:
        drafts = kind.value in names or kind.value == "request_row"  # no model but a draft has such rows
        names.append(f"draft.{kind.value}" if drafts else kind.value)
    return tuple(names)


def _differences(found: Mapping[str, Any], states: Sequence[tuple[str, ...]], kv_args: Any) -> Iterator[str]:
    names = [name for each in states for name in each]
    if len(set(names)) != len(names):
        yield f"a state type comes more than twice: {', '.join(names)}"
    for each, *lists in zip(
        states, kv_args.state_data_ptrs, kv_args.state_data_lens, kv_args.state_item_lens, strict=True
    ):
        if each[0] not in found:
            yield f"SGLang moves the state type {each[0]!r}, which the pools do not describe"
        else:
            described, listed = _described([found[name] for name in each]), _listed(*lists)
            if each[0] == TAIL:  # SGLang lists a request's ring as one item
                described, listed = (Counter((*one[:2], 0) for one in some) for some in (described, listed))
            yield from _compare(each[0], described, listed)
    pages = [each for name, each in found.items() if name not in names and name != "aux"]
    kinds = {each.component.type for each in pages}
    if kinds - PAGES:
        yield f"the pools describe {', '.join(sorted(kinds - PAGES))}, which SGLang does not move"
    listed = _listed(kv_args.kv_data_ptrs, kv_args.kv_data_lens, kv_args.kv_item_lens)
    yield from _compare("kv", _described(pages), listed)
    if "aux" in found:
        rows = _listed(kv_args.aux_data_ptrs, kv_args.aux_data_lens, kv_args.aux_item_lens)
        yield from _compare("aux", _described([found["aux"]]), rows)


def _unfit(pool: Any) -> Iterator[str]:
    """Pools whose lists SGLang's own indices do not fit."""
    if getattr(pool, "_unified_kv", False):
        yield (
            "the pool keeps windows and compressed rows in one tensor (ROCm), and SGLang names rings of the compressor "
            "by pages, which the pool keeps by request"
        )
    if getattr(pool, "request_window", None) is not None:
        yield (
            "windows are kept by request (--enable-encoder-swa-bounded-replay), and where one crosses a page, SGLang "
            "names the same page twice"
        )


def _unlisted(pools: Pools, names: Sequence[str]) -> Iterator[str]:
    """Scales that no list of SGLang has: quantised latents would arrive without them."""
    for pool in (pools.pages, pools.draft):
        full = getattr(pool, "full_kv_pool", None) or pool
        if getattr(full, "kv_scale_buffer", None) and "block_scale" not in names:
            yield "the pool has scales in 'kv_scale_buffer', which SGLang does not list"


def _compare(name: str, described: Counter[Buffer], listed: Counter[Buffer]) -> Iterator[str]:
    for only, who in ((listed - described, "only SGLang lists"), (described - listed, "only the pools describe")):
        if only:
            some = ", ".join(f"{nbytes} bytes at {address:#x} in items of {item}" for address, nbytes, item in only)
            yield f"{who} {only.total()} buffers of {name!r}: {some:.400}"


def _described(components: Sequence[Any]) -> Counter[Buffer]:
    buffers: Counter[Buffer] = Counter()
    for described in components:
        for buffer in described.component.buffers:
            if buffer.count:
                address = described.regions[buffer.region].address + buffer.offset
                buffers[address, buffer.stride * buffer.count, buffer.stride] += 1
    return buffers


def _listed(addresses: Sequence[int], lengths: Sequence[int], items: Sequence[int]) -> Counter[Buffer]:
    listed = zip(addresses, lengths, items, strict=True)
    # Rows behind the last whole item are a compressor's sentinel and padding: no index names them.
    return Counter((int(address), int(nbytes) // item * item, int(item)) for address, nbytes, item in listed if nbytes)


def _rows(metadata: Any, kv_args: Any) -> dict[str, Any]:
    """The tensors of the metadata rows by the names of their attributes, in SGLang's order."""
    names = {each.data_ptr(): name for name, each in vars(metadata).items() if hasattr(each, "data_ptr")}
    missing = [address for address in kv_args.aux_data_ptrs if address not in names]
    if missing:
        raise StateError(
            "SGLang lists metadata rows that its MetadataBuffers do not have",
            cause=", ".join(f"{address:#x}" for address in missing),
        )
    return {names[address]: getattr(metadata, names[address]) for address in kv_args.aux_data_ptrs}


def _window_heads(pools: Pools) -> int:
    """KV heads of sliding-window layers in the whole model."""
    return int(pools.config.get_swa_num_kv_heads(1))


def _state_tensors(cache: Any, blocks: Blocks) -> list[StateTensor]:
    """The tensors of recurrent layers, in the order in which SGLang lists them.

    Args:
        cache: The pool's tensors.
        blocks: Blocks of a convolution's channels, if the pool does not name them.
    """
    convs = list(cache.conv)
    names = ["conv"] if len(convs) == 1 else [f"conv{number}" for number in range(len(convs))]
    found = [StateTensor(name, Element.of(each.dtype), blocks) for name, each in zip(names, convs, strict=True)]
    temporal = cache.temporal
    if math.prod(temporal.shape):
        found.append(StateTensor("ssm", Element.of(temporal.dtype)))
    return found


def _has_unnamed_blocks(pool: Any) -> bool:
    """Whether a rank's share of convolution state may be cut out of several blocks that SGLang's pool does not name.

    In Mamba 2 these are x, B and C. Without them, another TP width cannot know which channels a rank has.
    """
    if getattr(pool, "conv_shard_groups", None):
        return False
    cache, axis = pool.mamba_cache, getattr(pool, "conv_slice_axis", 0)
    layers, slots, *heads, state = cache.temporal.shape
    if not layers * slots * state:
        return False  # short convolutions alone
    return any(conv.numel() and conv.shape[2 + axis] != math.prod(heads) for conv in cache.conv)
