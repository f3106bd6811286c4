"""The engines alone: state copied by hand must decode to the same bits as if it had never moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from statelink_demo.allocator import OutOfItemsError
from statelink_demo.decode import DecodeEngine, RowError
from statelink_demo.model import build_model
from statelink_demo.pools import Allocation, StatePools
from statelink_demo.prefill import PrefillEngine, PrefillRequest
from statelink_demo.prompts import make_prompt
from statelink_demo.reference import reference
from statelink_demo.runtime import configure_torch
from statelink_demo.shape import StateShape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import Qwen3NextForCausalLM

    from statelink_demo.forward import Generation
    from statelink_demo.layout import PoolLayout

SEED = 7
ROOM = 2**63 + 5
LENGTHS = (1, 2, 7, 16, 64, 65, 100, 203)
"""Below the convolution's taps, below a page, a page, a chunk, one more than a chunk, and odd ones."""

LAYERS = range(8)
COMPONENTS = [
    *(("k", layer) for layer in (3, 7)),
    *(("v", layer) for layer in (3, 7)),
    *(("conv", layer) for layer in (0, 1, 2, 4, 5, 6)),
    *(("recurrent", layer) for layer in (0, 1, 2, 4, 5, 6)),
]


@pytest.fixture(scope="module", autouse=True)
def _torch_settings() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    configure_torch()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="module")
def model() -> Qwen3NextForCausalLM:
    return build_model(SEED)


@pytest.fixture(scope="module")
def expected(model: Qwen3NextForCausalLM) -> dict[int, Generation]:
    return {length: reference(model, make_prompt(length, length)) for length in LENGTHS}


class Pair:
    """A prefill and a decode engine over separate pools, and one finished request copied across."""

    def __init__(self, model: Qwen3NextForCausalLM, length: int) -> None:
        shape = StateShape.of(model.config)
        self.source = StatePools(shape, pages=40, slots=3, rows=4, seed=1)
        self.target = StatePools(shape, pages=24, slots=5, rows=2, seed=2)
        self.prefill = PrefillEngine(model, self.source)
        self.engine = DecodeEngine(model, self.target)
        self.request = self.prefill.admit(ROOM, make_prompt(length, length))
        self.prefill.run(self.request)
        self.sent = self.request.allocation
        self.held = self.target.allocate(length)
        self.copy()

    def copy(self) -> None:
        """Carry every listed item across."""
        for source, target in zip(self.source.layouts(), self.target.layouts(), strict=True):
            target.raw()[list(self.held.ids(target.index))] = source.raw()[list(self.sent.ids(source.index))]

    def decode(self, count: int = 1) -> Generation:
        """Decode the carried request."""
        return self.engine.decode(self.held.pages, self.held.slot, self.held.row, room=ROOM, count=count)

    def pool(self, name: str, layer: int | None) -> PoolLayout:
        """Return one pool of the decode side."""
        (found,) = (p for p in self.target.layouts() if (p.name, p.layer) == (name, layer))
        return found


@pytest.fixture(scope="module")
def shared_pair(model: Qwen3NextForCausalLM) -> Pair:
    return Pair(model, 100)


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    yield shared_pair
    shared_pair.copy()


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_reproduces_the_reference(
    model: Qwen3NextForCausalLM, expected: dict[int, Generation], length: int
) -> None:
    pair = Pair(model, length)
    pair.prefill.release(pair.request)
    got = pair.decode(count=32)
    assert torch.equal(got.logits, expected[length].logits)
    assert got.tokens == expected[length].tokens
    assert got.same_as(expected[length])


def test_tokens_are_not_degenerate(expected: dict[int, Generation]) -> None:
    assert len({generation.tokens for generation in expected.values()}) == len(LENGTHS)
    for generation in expected.values():
        assert len(generation.tokens) == 32
        assert len(set(generation.tokens)) > 20
        assert generation.logits.isfinite().all()


@pytest.mark.parametrize(("name", "layer"), COMPONENTS)
def test_zeroing_a_component_changes_the_first_logits(
    pair: Pair, expected: dict[int, Generation], name: str, layer: int
) -> None:
    pool = pair.pool(name, layer)
    pool.raw()[list(pair.held.ids(pool.index))] = 0
    assert not torch.equal(pair.decode().logits, expected[100].logits)


def test_zeroing_the_first_token_changes_the_first_logits(pair: Pair, expected: dict[int, Generation]) -> None:
    assert expected[100].first_token != 0
    pair.pool("output_ids", None).raw()[pair.held.row] = 0
    assert not torch.equal(pair.decode().logits, expected[100].logits)


def test_zeroing_the_logprob_shows(pair: Pair, expected: dict[int, Generation]) -> None:
    pair.pool("logprobs", None).raw()[pair.held.row] = 0
    assert not pair.decode(count=32).same_as(expected[100])


@pytest.mark.parametrize(("name", "message"), [("counts", "says 0 tokens"), ("room", "belongs to room 0")])
def test_zeroing_the_rest_of_the_row_is_refused(pair: Pair, name: str, message: str) -> None:
    pair.pool(name, None).raw()[pair.held.row] = 0
    with pytest.raises(RowError, match=message):
        pair.decode()


@pytest.mark.parametrize(("name", "layer"), [("k", 3), ("v", 7)])
@pytest.mark.parametrize("part", ["page", "head"])
def test_zeroing_part_of_a_page_pool_changes_the_first_logits(
    pair: Pair, expected: dict[int, Generation], name: str, layer: int, part: str
) -> None:
    tensor = pair.pool(name, layer).tensor
    for which in range(len(pair.held.pages) if part == "page" else tensor.shape[2]):
        if part == "page":
            tensor[pair.held.pages[which]] = 0
        else:
            tensor[list(pair.held.pages), :, which] = 0
        assert not torch.equal(pair.decode().logits, expected[100].logits), which
        pair.copy()


@pytest.mark.parametrize("layer", [0, 6])
def test_zeroing_part_of_a_slot_changes_the_first_logits(
    pair: Pair, expected: dict[int, Generation], layer: int
) -> None:
    conv, recurrent = pair.pool("conv", layer), pair.pool("recurrent", layer)
    groups = torch.split(conv.tensor[pair.held.slot], list(conv.groups))
    taps = conv.tensor[pair.held.slot].unbind(dim=1)
    heads = recurrent.tensor[pair.held.slot].unbind(dim=0)
    for which, part in enumerate((*groups, *taps, *heads)):
        part.zero_()
        assert not torch.equal(pair.decode().logits, expected[100].logits), which
        pair.copy()


def test_layouts_describe_every_pool(model: Qwen3NextForCausalLM) -> None:
    pools = StatePools(StateShape.of(model.config), pages=12, page_size=16, slots=3, rows=4)
    found = {(p.name, p.layer): p for p in pools.layouts()}
    assert list(found)[:16] == COMPONENTS
    assert found["k", 3].tensor.shape == (12, 16, 4, 32)
    assert found["conv", 0].tensor.shape == (3, 384, 3)
    assert found["conv", 0].groups == (64, 64, 256)
    assert found["recurrent", 0].tensor.shape == (3, 8, 16, 32)
    assert found["recurrent", 0].tensor.dtype == torch.float32
    for pool in found.values():
        assert len(pool.axes) == pool.tensor.ndim - 1
        assert pool.raw().base is not None
        assert pool.raw().ctypes.data == pool.tensor.data_ptr()
        assert pool.raw().nbytes == pool.tensor.nbytes
        assert pool.component != "metadata" or pool.item_nbytes >= 64


def test_callbacks_see_state_that_is_already_in_the_pools(model: Qwen3NextForCausalLM) -> None:
    events: list[tuple[int | None, int, int]] = []
    pools = StatePools(StateShape.of(model.config))

    def on_layer(request: PrefillRequest, layer: int, start: int, stop: int) -> None:
        events.append((layer, start, stop))
        held = request.allocation
        if layer in pools.kv.keys:
            keys, values = pools.kv.read(layer, held.pages, stop)
            assert keys.isfinite().all()
            assert values.isfinite().all()
        else:
            conv, recurrent = pools.slots.read(layer, held.slot)
            assert conv.isfinite().all()
            assert recurrent.isfinite().all()

    def on_chunk(request: PrefillRequest, start: int, stop: int) -> None:
        events.append((None, start, stop))
        assert request.computed == stop
        assert request.done == (stop == request.tokens)
        row = pools.rows.read(request.allocation.row)
        assert (row.room == ROOM) == request.done

    engine = PrefillEngine(model, pools, on_chunk=on_chunk, on_layer=on_layer)
    engine.run(engine.admit(ROOM, make_prompt(0, 150)))
    spans = [(0, 64), (64, 128), (128, 150)]
    assert events == [(layer, *span) for span in spans for layer in (*LAYERS, None)]


def test_interleaved_prompts_do_not_disturb_each_other(
    model: Qwen3NextForCausalLM, expected: dict[int, Generation]
) -> None:
    pools = StatePools(StateShape.of(model.config))
    engine = PrefillEngine(model, pools)
    requests = [engine.admit(length, make_prompt(length, length)) for length in (203, 65)]
    pending = list(requests)
    while pending:
        pending = [request for request in pending if not engine.step(request)]
    decode = DecodeEngine(model, pools)
    for request in requests:
        held = request.allocation
        got = decode.decode(held.pages, held.slot, held.row, room=request.room)
        assert got.same_as(expected[request.tokens])


def test_released_memory_is_poisoned_and_scattered(pair: Pair, model: Qwen3NextForCausalLM) -> None:
    fresh = Pair(model, 100)
    stale = fresh.sent
    assert list(stale.pages) != sorted(stale.pages)
    fresh.prefill.release(fresh.request)
    fresh.source.rows.write(stale.row, pair.source.rows.read(pair.sent.row))
    engine = DecodeEngine(model, fresh.source)
    got = engine.decode(stale.pages, stale.slot, stale.row, room=ROOM, count=1)
    assert got.logits.isnan().all()
    with pytest.raises(ValueError, match="not all held"):
        fresh.prefill.release(fresh.request)


def test_exhausted_pools_take_nothing(model: Qwen3NextForCausalLM) -> None:
    pools = StatePools(StateShape.of(model.config), pages=4, slots=1, rows=1)
    with pytest.raises(OutOfItemsError, match="5 pages needed, 4 of 4 free"):
        pools.allocate(65)
    held = pools.allocate(64)
    with pytest.raises(OutOfItemsError, match="0 slots"):
        pools.allocate(0)
    pools.release(held)
    assert isinstance(pools.allocate(64), Allocation)
