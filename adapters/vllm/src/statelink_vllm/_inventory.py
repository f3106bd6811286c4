"""Describes what a worker holds: a component for each kind of layers in each group that has a block table in vLLM.

Groups take turns in one allocation. A block id belongs to one of them at a time, so their components may have the same
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from statelink import indices_of, state
from statelink.errors import StateError

from ._fills import fill_of
from ._kinds import ATTENTION, LATENT, RECURRENT, Kind, kind_of, numbers_of
from ._recurrent import packing_of

__all__ = ["Group", "Model", "describe_cache"]


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
        draft: Whether a draft model has a layer, by its name.
        draft_heads: KV heads of the whole draft model.
        positions: Which positions this rank holds of layers that decode context parallelism shards.
    """

    tp: tuple[int, int]
    heads: int
    groups: int | None
    channels_first: bool
    backend: Callable[[str], str]
    number: Callable[[str], int]
    pages: Mapping[str, str] = {}
    draft: Callable[[str], bool] = lambda name: False
    draft_heads: int = 0
    positions: state.Partition = state.Partition()


class Group(NamedTuple):
    """How vLLM's block table of a group becomes indices of a component.

    Attributes:
        table: Number of the group among the groups that are moved. Its block table has this number in a message.
        component: The component.
        ratio: Items of the component in a block: more than one if the backend of attention splits blocks.
        recurrent: Whether the request's state is in one block.
        spare: Blocks at the end of a recurrent table that only speculation uses.
        layers: vLLM's names of the layers.
        draft: Whether a draft model has the layers.
        of_index: Whether they are the index of sparse attention.
    """

    table: int
    component: Any
    ratio: int = 1
    recurrent: bool = False
    spare: int = 0
    layers: tuple[str, ...] = ()
    draft: bool = False
    of_index: bool = False

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
            found = indices_of(self.component, tokens, prefix, pages=self.items_of(table))
        if (found < self.ratio).any() or (self.recurrent and not len(found)):
            raise StateError(
                f"state of component {self.component.name!r} is not held any more",
                cause=f"the block table {list(table)!r:.200} has the null block among what {tokens} tokens need",
            )
        return found

    def items_of(self, blocks: Sequence[int]) -> Any:
        """The items of these blocks, in their order."""
        return (np.asarray(blocks, np.int64)[:, None] * self.ratio + np.arange(self.ratio)).ravel()

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
    for place, (number, group) in enumerate(zip(numbers_of(moved), moved, strict=True)):
        for kind, layers in _by_kind(group, caches, model).items():
            specs = [_spec_of(group, layer) for layer in layers]
            component, found = _describe(kind, kind.name(number), place, specs, layers, config.num_blocks, model)
            described.append(component)
            groups.append(found)
    addresses = {cache.data_ptr() for name, cache in caches.items() if name in named}
    beyond = [name for name, cache in caches.items() if name not in named and cache.data_ptr() not in addresses]
    if beyond:
        raise StateError("vLLM registers layers of no group", cause=", ".join(beyond)[:400])
    return described, tuple(groups)


def _by_kind(group: Any, caches: Mapping[str, Any], model: Model) -> dict[Kind, dict[str, Any]]:
    """The layers of a group on this rank, by their kind: none if a stage of a pipeline has no layer of the group."""
    found: dict[Kind, dict[str, Any]] = {}
    for layer, cache in _own(group.layer_names, caches):
        kind = kind_of(layer, _spec_of(group, layer), draft=model.draft(layer))
        found.setdefault(kind, {})[layer] = cache
    return found


def _spec_of(group: Any, layer: str) -> Any:
    """The specification of a layer: that of its group, or its own if the group's layers differ."""
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return group.kv_cache_spec if inner is None else inner[layer]


def _own(names: Sequence[str], caches: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The layers of a group on this rank. A layer that shares another one's cache is left out."""
    seen = set()
    for name in names:
        if name in caches and caches[name].data_ptr() not in seen:
            seen.add(caches[name].data_ptr())
            yield name, caches[name]


def _describe(
    kind: Kind, name: str, place: int, specs: Sequence[Any], layers: Mapping[str, Any], blocks: int, model: Model
) -> tuple[state.Described, Group]:
    types = sorted({type(each).__name__ for each in specs})
    if len(types) > 1 or types[0] not in (*ATTENTION, *LATENT, *RECURRENT):
        raise StateError(
            f"the layers of group {name!r} cannot be described",
            cause=f"their KV cache specification is {', '.join(types)}",
            hint=f"known are {', '.join((*ATTENTION, *LATENT, *RECURRENT))}",
        )
    if any(getattr(each, "bounded_replay", False) for each in specs):
        raise StateError(
            f"the layers of group {name!r} cannot be described",
            cause="vLLM computes their windows again after a prefix hit (bounded replay), and keeps none of them",
        )
    numbers = _numbered(name, layers, model)
    if types[0] in RECURRENT:
        described, found = _recurrent(name, place, specs, numbers, model)
    else:
        ratio = _split(name, numbers, blocks)
        if kind.ratio == 1:
            described = _attention(kind, name, specs, layers, numbers, model)
        else:
            described = _compressed(kind, name, specs, layers, numbers, ratio, model)
        found = Group(place, described.component, ratio=ratio)
    return described, found._replace(layers=tuple(layers), draft=kind.draft, of_index=kind.of_index)


def _numbered(name: str, layers: Mapping[str, Any], model: Model) -> dict[int, Any]:
    numbered = {model.number(layer): cache for layer, cache in layers.items()}
    if len(numbered) != len(layers):
        raise StateError(f"two layers of group {name!r} have one number", cause=", ".join(layers)[:400])
    return numbered


def _split(name: str, layers: Mapping[int, Any], blocks: int) -> int:
    """How many items of the layers a block has."""
    for number, cache in layers.items():
        if cache.shape[0] % blocks:
            raise StateError(
                f"layer {number} of group {name!r} has no whole number of items in a block",
                cause=f"{cache.shape[0]} items, {blocks} blocks",
            )
    ratios = {cache.shape[0] // blocks for cache in layers.values()}
    if len(ratios) > 1:
        raise StateError(f"the layers of group {name!r} split blocks in several ways", cause=f"{sorted(ratios)}")
    return int(ratios.pop())


def _attention(
    kind: Kind, name: str, specs: Sequence[Any], layers: Mapping[str, Any], numbers: Mapping[int, Any], model: Model
) -> state.Described:
    spec = specs[0]
    latent = type(spec).__name__ in LATENT
    counts = {each.num_heads for each in specs}
    if len(counts) > 1:
        raise StateError(f"the layers of group {name!r} have several numbers of heads", cause=f"{sorted(counts)}")
    fill = fill_of(kind, specs, [model.backend(layer) for layer in layers], model.pages, latent=latent)
    window = getattr(spec, "sliding_window", None) if "Sliding" in type(spec).__name__ else None
    # A specification of full attention may have this number, too: then vLLM keeps every token.
    chunk = spec.attention_chunk_size if "Chunked" in type(spec).__name__ else None
    return state.fused_pages(
        numbers,
        heads=1 if latent else _heads(name, spec, model.draft_heads if kind.draft else model.heads, model.tp[1]),
        tp=(0, 1) if latent else model.tp,
        keys=fill.keys,
        halves=fill.halves,
        opaque=fill.opaque,
        # The last token of the prompt is computed on decode, so prefill's window ends one token earlier.
        window=None if window is None else max(window - 1, 1),
        # After n tokens, vLLM holds those from n - n mod chunk on: what the token at position n attends to.
        attention_chunk=chunk,
        name=name,
        type=kind.type,
        partition=_positions(spec, model),
        replicated=latent,
        format=fill.format,
    )


def _compressed(
    kind: Kind,
    name: str,
    specs: Sequence[Any],
    layers: Mapping[str, Any],
    numbers: Mapping[int, Any],
    ratio: int,
    model: Model,
) -> state.Described:
    """Rows that stand for several tokens each. They move with rows that are not complete yet."""
    spec = specs[0]
    if not isinstance(kind.ratio, int) or len({each.block_size for each in specs}) > 1:
        raise StateError(
            f"the layers of group {name!r} cannot be described",
            cause=f"one of their states stands for {kind.ratio} tokens, in blocks of {spec.block_size}",
        )
    fill = fill_of(kind, specs, [model.backend(layer) for layer in layers], model.pages, latent=True)
    part = "index" if kind.of_index else "kv"
    page = spec.block_size // ratio
    return state.compressed_pages(
        {number: {part: cache[:, 0]} for number, cache in numbers.items()},
        page=page,
        name=name,
        type=kind.type,
        partition=_positions(spec, model),
        replicated=True,
        # Their rows are not next to each other in a page, so that no row can move into a page of another size.
        format=f"{fill.format}, pages of {page}" if fill.opaque else fill.format,
    )


def _positions(spec: Any, model: Model) -> state.Partition:
    """Which positions of a layer this rank holds."""
    return model.positions if spec.dcp_sharded else state.Partition()


def _heads(name: str, spec: Any, heads: int, width: int) -> int:
    """KV heads of the layers of a group in the whole model, which has ``heads`` in most of its layers."""
    if spec.num_heads != spec.num_kv_heads:
        raise StateError(
            f"the layers of group {name!r} pack their heads in a way that is not known",
            cause=f"{spec.num_heads} places for {spec.num_kv_heads} heads",
        )
    if width == 1:
        return int(spec.num_kv_heads)
    if max(heads // width, 1) == spec.num_kv_heads:
        return heads
    if spec.num_kv_heads > 1:
        return int(spec.num_kv_heads) * width
    raise StateError(
        f"the number of KV heads of group {name!r} in the whole model is not known",
        cause=f"the model has {heads}; each of {width} ranks has {spec.num_kv_heads} in this group",
    )


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
