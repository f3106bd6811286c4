"""Describes what a worker holds: one component for each group of layers that share a block table in vLLM.

Groups take turns in one allocation. A block id belongs to one of them at a time, so their components may have the same
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from statelink import indices_of, state
from statelink.errors import StateError

from ._recurrent import packing_of

__all__ = ["Group", "Model", "describe_cache"]

PAGES = dict.fromkeys(("FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION"), "pairs")
"""How backends of attention fill pages, where that is known; see `statelink_vllm._options.FILLS`."""

ATTENTION = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
LATENT = ("MLAAttentionSpec", "SlidingWindowMLASpec")
RECURRENT = ("MambaSpec",)


class Model(NamedTuple):
    """What the cache itself does not say.

    Attributes:
        tp: This rank and the width of tensor parallelism.
        heads: KV heads of the whole model, before any replication.
        groups: Groups of Mamba2 layers in the whole model, if it has such layers.
        channels_first: Whether convolution states have their channels first.
        backend: Name of the backend of attention of a layer.
        number: Number of a layer in the whole model, by its name.
        pages: What the operator says of how backends of attention fill pages.
    """

    tp: tuple[int, int]
    heads: int
    groups: int | None
    channels_first: bool
    backend: Callable[[str], str]
    number: Callable[[str], int]
    pages: Mapping[str, str] = {}


class Group(NamedTuple):
    """How vLLM's block table of a group becomes indices of a component.

    Attributes:
        table: Number of the group among the groups that are moved. Its block table has this number in a message.
        component: The component.
        ratio: Items of the component in a block: more than one if the backend of attention splits blocks.
        recurrent: Whether the request's state is in one block.
        spare: Blocks at the end of a recurrent table that only speculation uses.
    """

    table: int
    component: Any
    ratio: int = 1
    recurrent: bool = False
    spare: int = 0

    def indices(self, table: Sequence[int], tokens: int, prefix: int) -> Any:
        """The indices of what has to move.

        Raises:
            StateError: A block that has to move is not held any more.
            RoomError: The table is too short.
        """
        if self.recurrent:
            held = table[: len(table) - self.spare]
            found = np.array(held[-1:], np.int64)
        else:
            blocks = np.asarray(table, np.int64)
            items = (blocks[:, None] * self.ratio + np.arange(self.ratio)).ravel()
            found = indices_of(self.component, tokens, prefix, pages=items)
        if (found < self.ratio).any() or (self.recurrent and not len(found)):
            raise StateError(
                f"state of component {self.component.name!r} is not held any more",
                cause=f"the block table {list(table)!r:.200} has the null block among what {tokens} tokens need",
            )
        return found

    @property
    def begins_inside(self) -> bool:
        """Whether what moves may begin inside a block: with a window, or with the attention chunk of the next token."""
        return not self.recurrent and self.component.kind.coverage in (state.Coverage.WINDOW, state.Coverage.OPEN)

    def lacking(self, indices: Any, nbytes: int) -> set[int]:
        """Blocks that vLLM must not keep for other requests, because a part of them may not have arrived.

        There is at most one: the block in which a window begins.

        vLLM keeps full blocks for other requests, and assumes that every token in them was computed. A window may begin
        in the middle of its first block. The tokens before it arrive only if prefill's block begins as early as
        decode's. If prefill's blocks are smaller than decode's, the result may have the block although it is complete.

        A block in which an attention chunk begins is not named. Nobody looks in front of that place: a request that
        finds the whole block computed goes on behind it, in this chunk or in a later one.

        Args:
            indices: What `indices` returned.
            nbytes: Bytes of the component that have arrived for these.
        """
        if self.recurrent or self.component.window is None or not len(indices):
            return set()
        item = sum(buffer.layout.held for buffer in self.component.buffers)
        first = int(indices[0])
        whole = first % self.ratio == 0 and nbytes >= item * len(indices)
        return set() if whole else {first // self.ratio}


def describe_cache(
    config: Any, caches: Mapping[str, Any], model: Model
) -> tuple[list[state.Described], tuple[Group, ...]]:
    """Describe the components of a worker, and how their block tables become indices.

    Args:
        config: vLLM's ``KVCacheConfig``.
        caches: The tensor of each layer by its name, ``[blocks, heads, tokens, content]``.
        model: What the cache itself does not say.

    Raises:
        StateError: Something in the cache cannot be described. The error names the group or the layer.
    """
    described, groups = [], []
    named: set[str] = set()
    for group in config.kv_cache_groups:
        named.update(group.layer_names)
    moved = [config.kv_cache_groups[number] for number in config.transfer_group_ids]
    for place, (name, group) in enumerate(zip(_named(moved), moved, strict=True)):
        layers = dict(_own(group.layer_names, caches))
        if layers:  # a stage of a pipeline may have no layer of a group
            component, found = _describe(name, place, group.kv_cache_spec, layers, config.num_blocks, model)
            described.append(component)
            groups.append(found)
    addresses = {cache.data_ptr() for name, cache in caches.items() if name in named}
    beyond = [name for name, cache in caches.items() if name not in named and cache.data_ptr() not in addresses]
    if beyond:
        raise StateError("vLLM registers layers of no group", cause=", ".join(beyond)[:400])
    return described, tuple(groups)


def _named(groups: Sequence[Any]) -> list[str]:
    """A name for each group: that of its state type, and its number among several of that type.

    Servers whose engines group the layers of a model in the same way have the same names.
    """
    types = [_type_of(group.kv_cache_spec) for group in groups]
    numbers = [types[:place].count(name) for place, name in enumerate(types)]
    return [f"{name}.{n}" if types.count(name) > 1 else name for name, n in zip(types, numbers, strict=True)]


def _type_of(spec: Any) -> str:
    """The state type of a group, even if the group cannot be described."""
    inner = getattr(spec, "kv_cache_specs", None)
    some = type(spec if inner is None else next(iter(inner.values()))).__name__
    if some in RECURRENT:
        return "mamba"
    return "swa" if "Sliding" in some else "chunked_local" if "Chunked" in some else "kv"


def _own(names: Sequence[str], caches: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The layers of a group on this rank. A layer that shares another one's cache is left out."""
    seen = set()
    for name in names:
        if name in caches and caches[name].data_ptr() not in seen:
            seen.add(caches[name].data_ptr())
            yield name, caches[name]


def _describe(
    name: str, place: int, spec: Any, layers: Mapping[str, Any], blocks: int, model: Model
) -> tuple[state.Described, Group]:
    inner = getattr(spec, "kv_cache_specs", None)
    specs = [spec] if inner is None else [inner[layer] for layer in layers]
    kinds = {type(each).__name__ for each in specs}
    kind = kinds.pop() if len(kinds) == 1 else ""
    if kind not in (*ATTENTION, *LATENT, *RECURRENT):
        found = kind or ", ".join(sorted({type(each).__name__ for each in specs}))
        raise StateError(
            f"the layers of group {name!r} cannot be described",
            cause=f"their KV cache specification is {found}",
            hint=f"known are {', '.join((*ATTENTION, *LATENT, *RECURRENT))}",
        )
    numbers = _numbered(name, layers, model)
    if kind in RECURRENT:
        return _recurrent(name, place, specs, numbers, model)
    return _attention(name, place, specs, numbers, blocks, model, next(iter(layers)))


def _numbered(name: str, layers: Mapping[str, Any], model: Model) -> dict[int, Any]:
    numbered = {model.number(layer): cache for layer, cache in layers.items()}
    if len(numbered) != len(layers):
        raise StateError(f"two layers of group {name!r} have one number", cause=", ".join(layers)[:400])
    return numbered


def _attention(
    name: str, place: int, specs: Sequence[Any], layers: Mapping[int, Any], blocks: int, model: Model, layer: str
) -> tuple[state.Described, Group]:
    spec = specs[0]
    latent = type(spec).__name__ in LATENT
    counts = {each.num_heads for each in specs}
    if len(counts) > 1:
        raise StateError(f"the layers of group {name!r} have several numbers of heads", cause=f"{sorted(counts)}")
    if spec.tokens_per_state != 1 or getattr(spec, "model_version", None):
        raise StateError(
            f"the layers of group {name!r} cannot be described",
            cause=f"one of their states stands for {spec.tokens_per_state} tokens",
        )
    for number, cache in layers.items():
        if cache.shape[0] % blocks:
            raise StateError(
                f"layer {number} of group {name!r} has no whole number of items in a block",
                cause=f"{cache.shape[0]} items, {blocks} blocks",
            )
    ratios = {cache.shape[0] // blocks for cache in layers.values()}
    if len(ratios) > 1:
        raise StateError(f"the layers of group {name!r} split blocks in several ways", cause=f"{sorted(ratios)}")
    backend = model.backend(layer)
    window = getattr(spec, "sliding_window", None) if "Sliding" in type(spec).__name__ else None
    # A specification of full attention may have this number, too: then vLLM keeps every token.
    chunk = spec.attention_chunk_size if "Chunked" in type(spec).__name__ else None
    content = "latent" if latent else {**PAGES, **model.pages}.get(backend, backend)
    keys = _keys(specs) if content in ("pairs", "halves") else 0
    described = state.fused_pages(
        layers,
        heads=1 if latent else _heads(name, spec, model),
        tp=(0, 1) if latent else model.tp,
        keys=keys,
        halves=keys > 0 and content == "halves",
        opaque=content not in ("pairs", "latent") and not keys,
        # The last token of the prompt is computed on decode, so prefill's window ends one token earlier.
        window=None if window is None else max(window - 1, 1),
        # After n tokens, vLLM holds those from n - n mod chunk on: what the token at position n attends to.
        attention_chunk=chunk,
        name=name,
        replicated=latent,
        format=_format(spec, "" if keys else content),
    )
    return described, Group(place, described.component, ratio=ratios.pop())


def _keys(specs: Sequence[Any]) -> int:
    """Elements of the key of a token and head, where the rest of its content is the value; else 0."""
    sizes = {(each.head_size, each.state_content_bytes, getattr(each.kv_quant_mode, "name", "NONE")) for each in specs}
    size, packed, quantised = sizes.pop()
    return int(size) if not sizes and packed is None and quantised == "NONE" else 0


def _heads(name: str, spec: Any, model: Model) -> int:
    """KV heads of the layers of a group in the whole model."""
    width = model.tp[1]
    if spec.num_heads != spec.num_kv_heads:
        raise StateError(
            f"the layers of group {name!r} pack their heads in a way that is not known",
            cause=f"{spec.num_heads} places for {spec.num_kv_heads} heads",
        )
    if width == 1:
        return int(spec.num_kv_heads)
    if max(model.heads // width, 1) == spec.num_kv_heads:
        return model.heads
    if spec.num_kv_heads > 1:
        return int(spec.num_kv_heads) * width
    raise StateError(
        f"the number of KV heads of group {name!r} in the whole model is not known",
        cause=f"the model has {model.heads}; each of {width} ranks has {spec.num_kv_heads} in this group",
    )


def _format(spec: Any, content: str) -> str:
    quantised = getattr(spec.kv_quant_mode, "name", "NONE")
    return content if quantised == "NONE" else f"{content} {quantised}"


def _recurrent(
    name: str, place: int, specs: Sequence[Any], layers: Mapping[int, Any], model: Model
) -> tuple[state.Described, Group]:
    spec = specs[0]
    if any(each != spec for each in specs):
        raise StateError(f"the recurrent layers of group {name!r} differ")
    tp = (0, 1) if spec.tp_replicated else model.tp
    packing = packing_of(spec, tp[1], model.groups, model.channels_first)
    described = state.packed_slots(
        {number: cache[:, 0, 0] for number, cache in layers.items()},
        states=packing.states,
        conv_groups=packing.conv_groups,
        heads=packing.heads,
        tp=tp,
        transposed=not model.channels_first,
        name=name,
        replicated=bool(spec.tp_replicated),
        format=spec.mamba_type.name,
    )
    return described, Group(place, described.component, recurrent=True, spare=spec.num_speculative_blocks)
