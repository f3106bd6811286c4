"""The engines alone: state copied by hand must decode to the same bits as if it had never moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from statelink_demo.demo import make_prompt
from statelink_demo.engine import PrefillEngine, decode, reference
from statelink_demo.inventory import describe_pools
from statelink_demo.model import build_model, configure_torch
from statelink_demo.pools import KV, POISON, OutOfItemsError, StatePools

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import Qwen3NextForCausalLM

    from statelink_demo.messages import Answer

ROOM = 2**63 + 5
COUNT = 12
"""Tokens that are generated."""
LENGTHS = (1, 2, 7, 16, 64, 65, 100, 203)
"""Below the convolution's taps, below a page, a page, a chunk, one more than a chunk, and odd ones."""


@pytest.fixture(scope="module", autouse=True)
def _torch_settings() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    configure_torch()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="module")
def model() -> Qwen3NextForCausalLM:
    return build_model(seed=7)


@pytest.fixture(scope="module")
def expected(model: Qwen3NextForCausalLM) -> dict[int, Answer]:
    return {length: reference(model, make_prompt(length, length), COUNT) for length in LENGTHS}


class Pair:
    """The pools of a prefill and of a decode engine, and one finished request copied across."""

    def __init__(self, model: Qwen3NextForCausalLM, length: int) -> None:
        self.model = model
        self.source = StatePools(model.config, pages=40, slots=3, rows=4, seed=1)
        self.target = StatePools(model.config, pages=24, slots=5, rows=2, seed=2)
        engine = PrefillEngine(model, self.source)
        request = engine.admit(ROOM, make_prompt(length, length))
        while not engine.step(request):
            pass
        self.sent = request.held
        self.held = self.target.allocate(length)
        self.copy()

    def copy(self) -> None:
        """Carry every listed item across."""
        sent, held = self.sent.items(), self.held.items()
        for source, target in zip(self.source.all, self.target.all, strict=True):
            target.raw()[list(held[target.index])] = source.raw()[list(sent[source.index])]

    def decode(self, count: int = 1) -> Answer:
        """Decode the carried request."""
        return decode(self.model, self.target, self.held, ROOM, count)


@pytest.fixture(scope="module")
def shared_pair(model: Qwen3NextForCausalLM) -> Pair:
    return Pair(model, 100)


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    yield shared_pair
    shared_pair.copy()


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_reproduces_the_reference(model: Qwen3NextForCausalLM, expected: dict[int, Answer], length: int) -> None:
    pair = Pair(model, length)
    pair.source.release(pair.sent)
    assert pair.decode(COUNT) == expected[length]


def test_tokens_are_not_degenerate(expected: dict[int, Answer]) -> None:
    assert len({answer.tokens for answer in expected.values()}) == len(LENGTHS)
    for answer in expected.values():
        assert len(answer.tokens) == COUNT
        assert len(set(answer.tokens)) > 7
        assert numbers(answer).isfinite().all()


@pytest.mark.parametrize(("name", "layer"), [("k", 3), ("v", 7)])
@pytest.mark.parametrize("part", ["page", "head"])
def test_zeroing_part_of_a_page_pool_changes_the_first_logits(
    pair: Pair, expected: dict[int, Answer], name: str, layer: int, part: str
) -> None:
    tensor = getattr(pair.target, name)[layer]
    for which in range(len(pair.held.pages) if part == "page" else tensor.shape[2]):
        if part == "page":
            tensor[pair.held.pages[which]] = 0
        else:
            tensor[list(pair.held.pages), :, which] = 0
        assert pair.decode().logits != expected[100].logits, which
        pair.copy()


@pytest.mark.parametrize("layer", [0, 6])
def test_zeroing_part_of_a_slot_changes_the_first_logits(pair: Pair, expected: dict[int, Answer], layer: int) -> None:
    conv, recurrent = (each[layer][pair.held.slot] for each in (pair.target.conv, pair.target.recurrent))
    parts = (*torch.split(conv, list(pair.target.conv_groups)), *conv.unbind(dim=1), *recurrent.unbind(dim=0))
    for which, part in enumerate(parts):
        part.zero_()
        assert pair.decode().logits != expected[100].logits, which
        pair.copy()


def test_the_inventory_names_every_pool(model: Qwen3NextForCausalLM) -> None:
    pools = StatePools(model.config, pages=12, slots=3, rows=4)
    inventory = describe_pools("prefill", pools, "revision")
    assert {each.name: (each.kind.name, each.page, len(each.buffers)) for each in inventory.components} == {
        "kv": ("kv", 16, 4),
        "mamba": ("mamba", 0, 12),
        "metadata": ("aux", 0, 4),
    }
    assert len(inventory.regions) == len(pools.all)
    conv = next(each for each in inventory.component("mamba").buffers if each.name == "layers.0.conv")
    assert [(slab.start[0], slab.stop[0]) for slab in conv.layout.slabs] == [(0, 64), (64, 128), (128, 384)]
    assert inventory.model == "revision"
    for pool in pools.all:
        raw = pool.raw()
        assert (raw.ctypes.data, raw.nbytes) == (pool.tensor.data_ptr(), pool.tensor.nbytes)
        assert (raw == POISON).all()


def test_each_layer_is_told_when_its_state_is_in_the_pools(model: Qwen3NextForCausalLM) -> None:
    pools = StatePools(model.config)
    engine = PrefillEngine(model, pools)
    request = engine.admit(ROOM, make_prompt(0, 150))
    events: list[tuple[int, tuple[int, int]]] = []

    def on_layer(layer: int) -> None:
        events.append((layer, request.span))
        held = request.held
        if layer in pools.k:
            places = pools.places(held.pages, 0, request.span[1])
            states = [pool[layer].flatten(0, 1)[places] for pool in (pools.k, pools.v)]
        else:
            states = [pool[layer][held.slot] for pool in (pools.conv, pools.recurrent)]
        assert all(state.isfinite().all() for state in states)

    done = [engine.step(request, on_layer)]
    while not done[-1]:
        assert pools.read_row(request.held.row).room != ROOM
        done.append(engine.step(request, on_layer))
    assert pools.read_row(request.held.row).room == ROOM
    assert events == [(layer, span) for span in ((0, 64), (64, 128), (128, 150)) for layer in range(8)]


def test_interleaved_prompts_do_not_disturb_each_other(
    model: Qwen3NextForCausalLM, expected: dict[int, Answer]
) -> None:
    pools = StatePools(model.config)
    engine = PrefillEngine(model, pools)
    requests = [engine.admit(length, make_prompt(length, length)) for length in (203, 65)]
    pending = list(requests)
    while pending:
        pending = [request for request in pending if not engine.step(request)]
    for request in requests:
        assert decode(model, pools, request.held, request.room, COUNT) == expected[request.room]


def test_released_memory_is_poisoned_and_scattered(pair: Pair, model: Qwen3NextForCausalLM) -> None:
    fresh = Pair(model, 100)
    stale = fresh.sent
    assert list(stale.pages) != sorted(stale.pages)
    fresh.source.release(stale)
    fresh.source.write_row(stale.row, pair.source.read_row(pair.sent.row))
    assert numbers(decode(model, fresh.source, stale, ROOM, 1)).isnan().all()
    with pytest.raises(ValueError, match="not all held"):
        fresh.source.release(stale)


def test_exhausted_pools_take_nothing(model: Qwen3NextForCausalLM) -> None:
    pools = StatePools(model.config, pages=4, slots=1, rows=1)
    with pytest.raises(OutOfItemsError, match="kv: 5 items needed, 4 free"):
        pools.allocate(65)
    held = pools.allocate(64)
    with pytest.raises(OutOfItemsError, match="mamba: 1 items needed, 0 free"):
        pools.allocate(0)
    pools.release(held)
    assert len(pools.allocate(64).items()[KV]) == 4


def numbers(answer: Answer) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(answer.logits, np.int16).copy()).view(torch.bfloat16)
