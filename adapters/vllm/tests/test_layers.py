"""A worker whose device is behind the thread that launches, over real links: which layers go when, and what arrives.

Each layer is written when the test lets the device go on. Until then, its memory has something else.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from late_device import BACKEND, Device, as_kernels_see
from standin_gpu import passed_over_standin_gpu
from support.caches import Cache, Rank, attention, latent, make_cache, model_of, recurrent
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from statelink import LinkConfig, Status, state
from statelink_vllm.connector import Chunk, Leftovers, Open, Send, ToWorker, WorkerSide, describe_cache

pytestmark = pytest.mark.smoke

PATIENCE_SECONDS = 30.0
BLOCK, TOKENS = 16, 100
TABLES = [3, 7, 5, 11, 2, 9, 14], [4, 8, 6, 12, 1, 10, 15]
"""The blocks of a request in each group."""

LAYER_SECONDS = 0.001
"""What a layer takes on the device."""

rooms = itertools.count(1)

Layers = tuple[int, int] | None
Call = int | str
"""A layer that vLLM tells of, or what happens between two."""

FIRST: list[Any] = [(0, 2), (2, 4), (4, 6), (6, 7), (7, 8)]
"""What eight layers are divided into."""


class Behind(Device):
    """Does what was launched when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self._may, self._held = threading.Semaphore(0), 0

    def launch(self, work: Callable[[], None]) -> None:
        self._held += 1

        def kernel() -> None:
            self._may.acquire()
            time.sleep(LAYER_SECONDS)
            work()

        self.forwards.launch(kernel)

    def event(self) -> Any:
        event = self.Event()
        event.record()
        return event

    def go_on(self, count: int | None = None) -> None:
        """Do so much of what was launched."""
        count = self._held if count is None else count
        self._held -= count
        if count:
            self._may.release(count)

    def close(self) -> None:
        self.go_on()
        super().close()


class Watched:
    """A room of prefill that notes what was pushed."""

    def __init__(self, sending: Any) -> None:
        self.sending = sending
        self.pushes: list[Layers] = []
        self.last: list[int] = []
        """Numbers of the last pushes: there is one at most."""

    def push(self, items: Any, *, layers: Layers = None, last: bool, **more: Any) -> None:
        self.sending.push(items, layers=layers, last=last, **more)
        self.last += [len(self.pushes)] if last else []
        self.pushes.append(layers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sending, name)


class Sides:
    """A worker of prefill, a rank of decode, and a request.

    Args:
        groups: The layers of both; see `make_cache`.
        index: Whether the second group is the index of sparse attention.
        draft: The first layer of a draft model.
        told: Whether the worker sends layers before all are computed.
        options: Of both links.
        own: Of prefill's.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Any, Sequence[int]]],
        *,
        index: bool = False,
        draft: int = 99,
        told: bool = True,
        options: Any = (),
        own: Any = (),
    ) -> None:
        number = model_of().number
        model = model_of()._replace(draft=lambda name: number(name) >= draft, draft_heads=4)
        self.cache, there = (_index(make_cache(groups), index=index) for _ in range(2))
        components, described = describe_cache(self.cache.config, self.cache.tensors, model)
        self.groups = described
        self.device = Behind()
        self.worker = WorkerSide(
            LinkConfig.read({"role": "prefill", "backend": BACKEND, **dict(options), **dict(own)}),
            state.describe("prefill", components),
            described,
            Leftovers(self.cache.config, self.cache.tensors, described),
            self.device.event,
            number if told else None,
        )
        self.decode = Rank("decode", there, model, **dict(options))
        self.truth = {name: _another(as_kernels_see(tensor)) for name, tensor in self.cache.tensors.items()}
        self.begin()
        send = self.worker.link.send
        self.opened = mock.patch.object(self.worker.link, "send", lambda *a, **b: self._watch(send(*a, **b)))
        self.opened.start()

    def begin(self) -> None:
        """A request begins."""
        self.room, self.chunks, self.settled = next(rooms), 0, 0
        self.sending: Any = None
        self.receiving: Any = None

    def _watch(self, sending: Any) -> Watched:
        made = self.sending = Watched(sending)
        return made

    def close(self) -> None:
        self.opened.stop()
        self.device.close()
        self.worker.close()
        self.decode.link.close()

    def ask(self) -> None:
        """Decode asks for the request, and prefill knows if it has the room."""
        items = {each.component.name: each.indices(TABLES[each.table], TOKENS, 0) for each in self.decode.groups}
        peer = self.worker.link.address
        self.receiving = self.decode.link.receive(self.room, peer, TOKENS, items, content=b"request")
        if self.sending is not None:
            self.until(lambda: self.sending.prefix is not None)

    def fail(self) -> None:
        self.worker.failed()

    def leave(self) -> None:
        self.receiving.abort("its client has left")
        self.until(lambda: self.sending.status is Status.FAILED)

    def step(self, first: int, last: int, calls: Sequence[Call] = range(8), *, final: bool | None = None) -> None:
        """A step computes some tokens, and tells of layers."""
        name = "request"
        opens = {} if self.chunks else {name: Open(self.room, TOKENS, b"request")}
        early = {each.table for each in self.groups if not each.recurrent and each.component.window is None}
        final = last == TOKENS if final is None else final
        tables = tuple(
            TABLES[number][first // BLOCK : -(-last // BLOCK)] if number in early else []
            for number in range(len(self.cache.config.kv_cache_groups))
        )
        others = tuple([] if each else list(TABLES[number]) for number, each in enumerate(tables)) if final else ()
        self.worker.prepare(ToWorker(open=opens, chunks={name: Chunk(self.chunks, first, last, tables, final, others)}))
        self.chunks += 1
        if self.receiving is not None:
            self.until(lambda: self.sending.prefix is not None or self.sending.status is Status.FAILED)
        numbers = dict.fromkeys(int(name.split(".")[2]) for name in self.cache.tensors)
        for number in numbers:
            if number not in calls:
                self.device.launch(partial(self._compute, number, first, last))  # in a graph
        for call in calls:
            if isinstance(call, str):
                getattr(self, call)()
            else:
                self.device.launch(partial(self._compute, call, first, last))
                self.worker.layer(f"model.layers.{call}.attn")
        self.worker.computed()
        self.worker.computed()  # vLLM says so twice with its second model runner

    def _compute(self, number: int, first: int, last: int) -> None:
        for config, table in zip(self.cache.config.kv_cache_groups, TABLES, strict=False):
            blocks = table[first // BLOCK : -(-last // BLOCK)]
            for name in config.layer_names:
                if int(name.split(".")[2]) == number:
                    as_kernels_see(self.cache.tensors[name])[blocks] = self.truth[name][blocks]

    def end(self, why: str = "") -> None:
        """The request has ended on prefill."""
        tables = () if why else tuple(map(list, TABLES[: len(self.cache.config.kv_cache_groups)]))
        self.worker.prepare(ToWorker())
        self.worker.begin(ToWorker(send={"request": Send(self.room, TOKENS, tables, why, b"request")}))

    def until(self, found: Callable[[], Any]) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not found():
            assert time.monotonic() < end, "it does not come"
            time.sleep(0.001)

    def complete(self) -> bool:
        """Whether the last push was made. Another step begins."""
        self.worker.prepare(ToWorker())
        return bool(self.sending.last)

    def until_read(self, number: int) -> None:
        """Wait until nothing reads a push any more."""
        self.until(lambda: self.sending.settled > number)

    def wrong(self) -> list[int]:
        """Wait for decode. Returns the layers that are not as prefill has computed them."""
        assert self.receiving.wait(PATIENCE_SECONDS) is Status.SUCCEEDED, self.receiving.reason
        found = set()
        for group in self.decode.groups:
            items = group.indices(TABLES[group.table], TOKENS, 0)
            inside = torch.from_numpy(items)
            for layer in group.layers:
                number, there = int(layer.split(".")[2]), as_kernels_see(self.decode.cache.tensors[layer])[inside]
                if not torch.equal(_held(there, group), _held(self.truth[layer][inside], group)):
                    found.add(number)
        return sorted(found)

    def all_settled(self) -> bool:
        """Whether nothing reads any part, and nothing is left of the request."""
        self.worker.results()
        said = self.worker.said()
        self.settled += 0 if said is None else sum(said.settled.values())
        return self.settled == self.chunks and self.worker.settled


def _another(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().normal_() if tensor.is_floating_point() else tensor.clone().random_()


def _held(pages: torch.Tensor, group: Any) -> torch.Tensor:
    """What must have arrived: a window may begin inside a page, and the request ends inside the last one."""
    if group.recurrent:
        return pages
    tokens = pages.transpose(1, 2).flatten(0, 1)
    behind = -(-TOKENS // BLOCK) * BLOCK - TOKENS
    window = group.component.window or TOKENS
    return tokens[len(tokens) - behind - window : len(tokens) - behind]


def _index(cache: Cache, *, index: bool) -> Cache:
    """The same cache, whose second group is an index."""
    if not index:
        return cache
    names = cache.config.kv_cache_groups[1].layer_names
    new = {name: f"model.layers.{number}.indexer.k_cache" for number, name in enumerate(names)}
    config = cache.config
    groups = [config.kv_cache_groups[0], KVCacheGroupSpec([*new.values()], config.kv_cache_groups[1].kv_cache_spec)]
    tensors = {new.get(name, name): tensor for name, tensor in cache.tensors.items()}
    return Cache(KVCacheConfig(config.num_blocks, config.kv_cache_tensors, groups, kv_cache_layout="LBHNC"), tensors)


FULL = [(attention(4), range(8))]
WINDOWS = [(attention(4), range(0, 8, 2)), (attention(4, window=40), range(1, 8, 2))]
HYBRID = [
    (attention(4), range(0, 8, 2)),
    (recurrent("MAMBA1", (2, 8), (8, 4), page=attention(4).page_size_bytes), range(1, 8, 2)),
]
SPARSE = [(latent(), range(8)), (latent(), range(8, 16))]


@contextmanager
def asked(groups: Any, **more: Any) -> Iterator[Sides]:
    with closing(Sides(groups, **more)) as sides:
        yield sides


CASES: dict[str, tuple[Any, dict[str, Any], list[Call], list[Layers]]] = {
    "in order": (FULL, {}, [*range(8)], FIRST),
    "a whole graph": (FULL, {}, [], [None]),
    "some layers in a graph": (FULL, {}, [0, 1, 2, 3], [(0, 2), (2, 4), (4, 8)]),
    "a layer that is missing": (FULL, {}, [0, 1, 2, 4, 5, 6, 7], [(0, 2), (2, 8)]),
    "another order": (FULL, {}, [0, 3, 2, 1, 4, 5, 6, 7], [(0, 6), (6, 7), (7, 8)]),
    "as many as if they were in order": (FULL, {}, [5, 1, 0, 2, 3, 4, 6, 7], [(0, 7), (7, 8)]),
    "other layers": (FULL, {}, [0, 40, 1, 41, 2, 3, 4, 5, 6, 7, 42], FIRST),
    "halves that take turns": (FULL, {"told": False}, [0, 0, 1, 1], [None]),
    "decode asks in the middle": (FULL, {}, [0, 1, 2, "ask", 3, 4, 5, 6, 7], [(0, 4), (4, 6), (6, 7), (7, 8)]),
    "an index": (SPARSE, {"index": True}, [*range(8)], FIRST),
    "windows": (WINDOWS, {}, [*range(8)], FIRST),
    "recurrent layers": (HYBRID, {}, [0, 2, 4, 6], [(0, 1), (1, 3), (3, 5), (5, 7), None]),
    "a later stage of a pipeline": ([(attention(4), range(4, 8))], {}, [4, 5, 6, 7], [(0, 5), (5, 6), (6, 7), (7, 8)]),
    "one layer": ([(attention(4), (0,))], {}, [0], [(0, 1)]),
    "digests": (FULL, {"options": {"verify": "digest"}}, [*range(8)], FIRST),
    "staging": (FULL, {"options": {"staging": {"mode": "always"}}}, [*range(8)], FIRST),
    "twice before it is sent": (FULL, {}, [0, 0, *range(1, 8)], [None]),
}


OVER_GPU = {"in order", "a whole graph", "decode asks in the middle", "an index", "windows", "recurrent layers"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.standin_gpu] if case in OVER_GPU else []) for case in CASES]
)
def test_what_a_step_sends(case: str) -> None:
    """The whole prompt is computed in it. The device begins when all is launched."""
    groups, more, calls, pushes = CASES[case]
    with asked(groups, **more) as sides:
        if "ask" not in calls:
            sides.ask()
        sides.step(0, TOKENS, calls)
        assert sides.sending.pushes == pushes
        assert sides.sending.last == [len(pushes) - 1], "the last layers are the room's last push"
        sides.device.go_on()
        assert sides.wrong() == []
        sides.end()
        assert sides.sending.pushes == pushes, "nothing was left for the request's end"
        sides.until(sides.all_settled)


@pytest.mark.parametrize(
    ("groups", "pushes"),
    [(FULL, FIRST * 2), (WINDOWS, [(0, 1), (1, 3), (3, 5), (5, 7), *FIRST])],
    ids=["full", "window"],
)
def test_each_step_sends_its_own_part(groups: Any, pushes: list[Layers]) -> None:
    with asked(groups) as sides:
        sides.ask()
        sides.step(0, 48)
        sides.step(48, TOKENS)
        sides.end()
        assert (sides.sending.pushes, sides.sending.last) == (pushes, [len(pushes) - 1])
        sides.device.go_on()
        assert sides.wrong() == []
        sides.until(sides.all_settled)


def test_what_waits_for_decode_goes_before_the_layers_of_the_running_step() -> None:
    with asked(FULL) as sides:
        sides.step(0, 48)
        assert sides.sending.pushes == []
        sides.step(48, TOKENS, [0, 1, 2, "ask", 3, 4, 5, 6, 7])
        assert sides.sending.pushes == [None, (0, 4), (4, 6), (6, 7), (7, 8)]
        sides.device.go_on()
        assert sides.wrong() == []


def test_all_of_it_over_the_standin_gpu(tmp_path: Path) -> None:
    """With streams, events and memory of a driver; the real NIXL copies the layers by streams of its own."""
    assert passed_over_standin_gpu(Path(__file__), tmp_path) > len(FIRST)


@pytest.mark.standin_gpu
@pytest.mark.parametrize("forgotten", range(-1, len(FIRST)))
@pytest.mark.shows("layers that leave while the device is behind: none without its event")
def test_each_group_of_layers_waits_for_its_own_event(forgotten: int) -> None:
    """Without the event of a group, decode gets what was in that memory before."""
    with asked(FULL) as sides:
        sides.ask()
        sides.step(0, TOKENS)
        if forgotten >= 0:
            sides.device.recorded[forgotten].passes_at_once = True
        for number, (first, last) in enumerate(FIRST):
            if number == forgotten:
                sides.until_read(number)
            assert sides.sending.settled == number + (number == forgotten)
            sides.device.go_on(last - first)
            sides.until_read(number)
        assert sides.wrong() == ([] if forgotten < 0 else [*range(*FIRST[forgotten])])


@pytest.mark.parametrize("left", ["the layers of a draft model", "nothing that is known before the step has ended"])
def test_the_last_push_waits_for_the_end_where_something_may_be_left(left: str) -> None:
    """A draft is computed after the step; what another connector loads in it may not have come."""
    drafts = "draft" in left
    groups = [*FULL, (attention(4), (8,))] if drafts else FULL
    with asked(groups, draft=8) as sides:
        sides.ask()
        sides.step(0, TOKENS, final=False)
        assert (sides.sending.pushes, sides.sending.last) == (FIRST, [])
        sides.device.go_on()
        sides.end()
        assert (sides.sending.pushes, sides.sending.last) == ([*FIRST, None], [len(FIRST)])
        assert sides.wrong() == []
        sides.until(sides.all_settled)


def test_what_the_link_does_not_take_goes_later() -> None:
    with asked(FULL, own={"max_pushes": 3}) as sides:
        sides.ask()
        sides.step(0, TOKENS)
        assert sides.sending.pushes == FIRST[:3]
        sides.device.go_on()
        sides.until(lambda: sides.sending.settled == 3)
        sides.worker.prepare(ToWorker())
        assert (sides.sending.pushes, sides.sending.last) == ([*FIRST[:3], (6, 8)], [3])
        assert sides.wrong() == []


def test_a_part_that_has_begun_to_be_sent_is_not_withdrawn() -> None:
    """The request is preempted, and its prompt is computed again, in other blocks or in these."""
    with asked(FULL, own={"max_pushes": 1}) as sides:
        sides.ask()
        sides.step(0, 48)
        sides.worker.prepare(ToWorker(withdraw={"request"}))
        assert sides.worker.said() is None, "its blocks are held"
        sides.device.go_on()
        sides.until(lambda: sides.sending.settled == 1)
        sides.worker.prepare(ToWorker())
        assert sides.sending.pushes == [(0, 2), (2, 8)]
        sides.until(lambda: sides.sending.settled == 2)
        sides.step(0, TOKENS)
        sides.device.go_on()
        sides.until(sides.complete)
        assert sides.wrong() == []


@pytest.mark.parametrize("what", ["repeat", "fail", "leave"])
def test_a_step_that_goes_wrong_leaves_no_request_with_wrong_state(what: str) -> None:
    """A layer is computed again after it was sent; the forward pass raises an error; decode leaves."""
    with asked(FULL) as sides:
        sides.ask()
        sides.step(0, TOKENS, [0, 1, 2, *([1] if what == "repeat" else [what]), 3, 4, 5, 6, 7])
        sides.device.go_on()
        assert sides.receiving.wait(PATIENCE_SECONDS) is Status.FAILED
        said = {"repeat": "has computed layer", "fail": "forward pass of prefill has failed", "leave": "left"}
        assert said[what] in str(sides.receiving.reason)
        sides.end()
        sides.until(sides.all_settled)
        if what == "repeat":  # it is not tried again
            sides.begin()
            sides.ask()
            sides.step(0, TOKENS)
            assert sides.sending.pushes == [None]
            sides.device.go_on()
            assert sides.wrong() == []


@pytest.mark.parametrize("last", [48, TOKENS])
def test_an_abort_on_prefill_ends_the_request_on_decode_unless_it_has_everything(last: int) -> None:
    with asked(FULL) as sides:
        sides.ask()
        sides.step(0, last)
        sides.device.go_on()
        if last == TOKENS:
            assert sides.wrong() == []
        sides.end("its client has left")
        status = sides.receiving.wait(PATIENCE_SECONDS)
        assert status is (Status.SUCCEEDED if last == TOKENS else Status.FAILED)
        sides.until(sides.all_settled)
