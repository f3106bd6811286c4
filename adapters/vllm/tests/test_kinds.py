"""Models whose layers of several kinds, or of several models, vLLM puts into one group: every byte that has to move.

vLLM's own planner groups the layers and lays them out, as of the large models and on GPUs. Random bytes stand for what
the kernels write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.caches import Cache, Rank, hand, sides
from support.planned import MODELS, Planned, layers_of, plan

from statelink.errors import StatelinkError
from statelink_vllm.connector import describe_cache

if TYPE_CHECKING:
    from pathlib import Path


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "DSA": ("sparse", {}),
    "DSA in bf16, blocks of 128": ("sparse", {"packed": False, "block": 128}),
    "DSA with shared indices and MTP": ("sparse", {"leaders": 2, "mtp": 1}),
    "latents with DSpark": ("latent", {"drafts": 2}),
    "MiniMax-M3": ("minimax", {}),
    "MiniMax-M3 with EAGLE": ("minimax", {"mtp": 1}),
    "MiniMax-M3 with MTP": ("minimax", {"own": 1}),
    "a draft model with other heads": ("drafted", {}),
    "a draft model with the same heads": ("drafted", {"count": 8, "size": 128}),
    "EAGLE with the same heads": ("drafted", {"count": 8, "size": 128, "prefix": ""}),
    "DeepSeek V4": ("v4", {}),
    "DeepSeek V4 with MTP": ("v4", {"mtp": 1}),
    "DeepSeek V4 in bf16": ("v4", {"packed": False}),
    "DeepSeek V4, blocks of 512": ("v4", {"block": 512}),
}
NAMES = {
    "DSA": "kv dsa",
    "DSA with shared indices and MTP": "kv dsa draft.kv draft.dsa",
    "latents with DSpark": "kv draft.kv",
    "MiniMax-M3": "kv dsa",
    "MiniMax-M3 with EAGLE": "kv dsa draft.kv",
    "MiniMax-M3 with MTP": "kv dsa draft.kv draft.dsa",
    "a draft model with the same heads": "kv draft.kv",
    "EAGLE with the same heads": "kv draft.kv",
    "DeepSeek V4": "swa.0 swa.1 dsv4.c4 dsv4.c4.index dsv4.c128 swa.2 swa.3 swa.3.index swa.4",
}


def build(configuration: Path, case: str, width: int, **more: Any) -> list[tuple[Any, ...]]:
    """The ranks of a side."""
    name, given = CASES[case]
    model: Planned = MODELS[name](width, **{**given, **more})
    return [plan(configuration, model, rank, width) for rank in range(width)]


@pytest.mark.smoke
@pytest.mark.parametrize("case", NAMES)
def test_each_kind_of_layers_in_a_group_is_a_component(configuration: Path, case: str) -> None:
    ((cache, model),) = build(configuration, case, 1)
    components, groups = describe_cache(cache.config, cache.tensors, model)
    assert sorted(each.component.name for each in components) == sorted(NAMES[case].split())
    held = {buffer.layer for each in components for buffer in each.component.buffers}
    assert held == {model.number(name) for name in cache.tensors}
    assert sorted(name for group in groups for name in group.layers) == sorted(cache.tensors)


class Truth:
    """What each page of a request has to hold, of all heads: random bytes by layer and number of the page."""

    def __init__(self, tokens: int, model: Planned) -> None:
        self.tokens, self._model = tokens, model
        self._draw = torch.Generator().manual_seed(tokens)
        self._pages: dict[tuple[str, int], torch.Tensor] = {}

    def page(self, layer: str, number: int, spec: Any, cache: torch.Tensor) -> torch.Tensor:
        """Bytes ``[heads, rows, content]``, of the heads of the whole model."""
        if (layer, number) not in self._pages:
            _, _, rows, content = cache.view(torch.uint8).shape
            latent = "MLA" in type(spec).__name__
            draft = getattr(self._model.specs[layer], "is_draft", False)  # 0.31 does not say it
            count = 1 if latent else self._model.heads[draft]
            self._pages[layer, number] = torch.randint(
                0, 256, (count, rows, content), dtype=torch.uint8, generator=self._draw
            )
        return self._pages[layer, number]

    def needed(self, spec: Any, prefix: int) -> range:
        """The positions that decode's next token looks at, as vLLM's specification says, and that it does not have."""
        window = getattr(spec, "sliding_window", None)
        first = prefix if window is None else max(prefix, self.tokens - window + 1)
        return range(first, self.tokens)


def heads_here(rank: Rank, whole: torch.Tensor, here: int) -> slice:
    number, width = rank.tp
    return slice(0, 1) if len(whole) == 1 else slice(number * len(whole) // width, number * len(whole) // width + here)


def tables_of(cache: Cache, truth: Truth, seed: int) -> list[list[int]]:
    """The blocks of each group, which share one pool; 0 for what no window has any more."""
    ids = (torch.randperm(47, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    tables: dict[int, list[int]] = {}
    for group, _, spec in layers_of(cache):
        if group not in tables:
            first = truth.needed(spec, 0).start // spec.block_size
            count = -(-truth.tokens // spec.block_size)
            tables[group] = [0 if number < first else ids.pop() for number in range(count)]
    return [tables[group] for group in sorted(tables)]


def write(rank: Rank, tables: list[list[int]], truth: Truth) -> None:
    for group, layer, spec in layers_of(rank.cache):
        cache = rank.cache.tensors[layer]
        for number, block in enumerate(tables[group]):
            if block:
                page = truth.page(layer, number, spec, cache)
                cache[block].view(torch.uint8)[:] = page[heads_here(rank, page, cache.shape[1])]


def wrong(rank: Rank, tables: list[list[int]], truth: Truth, prefix: int, *, whole: bool) -> list[str]:
    """The layers of which decode lacks something, and how many rows were looked at."""
    found, looked = [], 0
    for group, layer, spec in layers_of(rank.cache):
        cache = rank.cache.tensors[layer]
        needed = truth.needed(spec, prefix)
        for number in range(needed.start // spec.block_size, len(tables[group])):
            page = truth.page(layer, number, spec, cache)
            ours = cache[tables[group][number]].view(torch.uint8)
            theirs = page[heads_here(rank, page, cache.shape[1])]
            first = max(needed.start - number * spec.block_size, 0)
            last = min(needed.stop - number * spec.block_size, spec.block_size)
            rows = slice(first, last) if spec.tokens_per_state == 1 and not whole else slice(None)
            looked += ours[:, rows].shape[1]
            if not torch.equal(ours[:, rows], theirs[:, rows]):
                found.append(layer)
    assert looked
    return found


@pytest.mark.parametrize("tokens", [5, 256, 613])
@pytest.mark.parametrize("widths", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("case", CASES)
def test_every_byte_arrives(configuration: Path, case: str, widths: tuple[int, int], tokens: int) -> None:
    truth = _truth(case, tokens)
    prefill, decode = (build(configuration, case, width) for width in widths)
    with sides(prefill, decode) as (sources, targets):
        ours, theirs = tables_of(sources[0].cache, truth, 1), tables_of(targets[0].cache, truth, 2)
        for rank in sources:
            write(rank, ours, truth)
        before = wrong(targets[0], theirs, truth, 0, whole=False)
        assert set(before) == set(targets[0].cache.tensors), "decode has to lack everything first"
        hand(sources, targets, tokens, 0, ours, theirs)
        for rank in targets:
            assert wrong(rank, theirs, truth, 0, whole=False) == []


@pytest.mark.smoke
@pytest.mark.parametrize("case", ["DSA", "MiniMax-M3", "DeepSeek V4 with MTP"])
def test_what_decode_has_of_the_prompt_is_not_moved_again(configuration: Path, case: str) -> None:
    tokens, prefix = 613, 512
    truth = _truth(case, tokens)
    with sides(build(configuration, case, 1), build(configuration, case, 1)) as (sources, targets):
        ours, theirs = tables_of(sources[0].cache, truth, 1), tables_of(targets[0].cache, truth, 2)
        write(sources[0], ours, truth)
        hand(sources, targets, tokens, prefix, ours, theirs)
        assert wrong(targets[0], theirs, truth, prefix, whole=False) == []
        assert wrong(targets[0], theirs, truth, 0, whole=False) != []


@pytest.mark.parametrize(
    ("case", "other", "said"),
    [
        ("DSA", 128, r"dsa.*(extent of axis 'cell'|page)"),
        ("DeepSeek V4", 512, r"dsv4\.c4.*format: .*pages of 512' on decode.*pages of 256' on prefill"),
    ],
)
def test_pages_that_only_kernels_know_need_blocks_of_one_size(
    configuration: Path, case: str, other: int, said: str
) -> None:
    truth = _truth(case, 256)
    pair = build(configuration, case, 1), build(configuration, case, 1, block=other)
    with sides(*pair) as (sources, targets):
        tables = [tables_of(each.cache, truth, 1) for (each,) in (sources, targets)]
        with pytest.raises(StatelinkError, match=f"(?s){said}"):
            hand(sources, targets, 256, 0, *tables)


@pytest.mark.parametrize(("case", "other"), [("MiniMax-M3 with EAGLE", 64), ("a draft model with other heads", 32)])
def test_pages_whose_rows_are_known_move_between_blocks_of_two_sizes(
    configuration: Path, case: str, other: int
) -> None:
    tokens = 200
    truth = _truth(case, tokens)
    with sides(build(configuration, case, 1), build(configuration, case, 1, block=other)) as ((source,), (target,)):
        ours, theirs = tables_of(source.cache, truth, 1), tables_of(target.cache, truth, 2)
        hand([source], [target], tokens, 0, ours, theirs)
        layers = [
            {layer: (tables[group], cache.tensors[layer]) for group, layer, _ in layers_of(cache)}
            for cache, tables in ((source.cache, ours), (target.cache, theirs))
        ]
        for layer, (table, sent) in layers[0].items():
            there, arrived = layers[1][layer]
            for token in range(tokens):
                a, b = (
                    pages[blocks[token // pages.shape[2]], :, token % pages.shape[2]].contiguous().view(torch.uint8)
                    for blocks, pages in ((table, sent), (there, arrived))
                )
                assert torch.equal(a, b), (layer, token)


def test_a_draft_model_that_one_side_lacks_is_refused_by_name(configuration: Path) -> None:
    for one, other in (("DSA", "DSA with shared indices and MTP"), ("MiniMax-M3 with EAGLE", "MiniMax-M3")):
        truth = _truth(one, 64)
        with sides(build(configuration, one, 1), build(configuration, other, 1)) as (sources, targets):
            tables = [tables_of(each.cache, truth, 1) for (each,) in (sources, targets)]
            with pytest.raises(StatelinkError, match=r"component draft\.kv \(type kv\)"):
                hand(sources, targets, 64, 0, *tables)


def _truth(case: str, tokens: int) -> Truth:
    name, given = CASES[case]
    return Truth(tokens, MODELS[name](1, **given))
