"""Layers that leave while the forward pass runs, over a device that computes late: real pools and links, no server."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from late_device import KIND, Device, to_device
from standin_gpu import passed_over_standin_gpu
from support.deepseek_v4 import make_v4, switched
from support.newest import OLDER
from support.pools import Made, listed, make_mha, make_with_draft
from support.sides import FAILED, SUCCESS, WAITING, Lists, Side, hand_over, meet, rooms, sides, until

from statelink_sglang import backend

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("sglang_context")]

N, PAGE, LAYERS = 100, 16, 8
GROUPS = (2, 4, 6, 7, 8)
LATE_SECONDS = 0.02
"""Seconds that a layer takes on the device."""


class Batch:
    """Requests of one forward pass, whose bytes a device writes late.

    Args:
        source: Prefill.
        chunks: For each request its sender, what SGLang has of it, and the span that is computed.
        tokens: N of each.
    """

    def __init__(self, source: Side, chunks: Sequence[tuple[Any, Lists, tuple[int, int]]], tokens: int = N) -> None:
        import torch
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        self.device, self.source, self.chunks = Device(), source, chunks
        page = source.page_size
        table = torch.zeros((len(chunks), tokens + page), dtype=torch.int32).as_subclass(self._copied_late())
        for row, (_, lists, _) in enumerate(chunks):
            slots = (lists.pages[:, None] * page + np.arange(page)).reshape(-1)
            table[row, : len(slots)] = torch.from_numpy(slots.astype(np.int32))
        self.backend: Any = SimpleNamespace(forward=self._attention)
        self.scheduler = SimpleNamespace(
            disagg_prefill_bootstrap_queue=SimpleNamespace(kv_manager=source),
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(attn_backend=self.backend)),
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            device_module=self.device,
            schedule_stream=self.device.schedules,
            forward_stream=self.device.forwards,
            enable_overlap=True,
        )
        self.batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, hicache_consumer_index=-1)
        self.batch.reqs = [self._request(row, *each, tokens) for row, each in enumerate(chunks)]
        self.tbo_children: Any = None
        self.enters = list(source.lists.layers)
        self.held: frozenset[int] = frozenset()
        """Layers that the device does not compute before it may go on."""
        self.keeps_up = False
        """Whether the device has computed a layer before the next one is entered."""
        self.go_on = threading.Event()
        self._launched = set[int]()
        self.random = np.random.default_rng(11)

    def _copied_late(self) -> Any:
        """The type of a tensor whose rows come to the host late, by the stream on which they are copied."""
        import torch

        device = self.device

        class Rows(torch.Tensor):
            @classmethod
            def __torch_function__(cls, called: Any, types: Any, args: Any = (), more: Any = None) -> Any:
                inner: Any = super().__torch_function__
                if called is not torch.Tensor.copy_:
                    return inner(called, types, args, more)
                device.current.launch(partial(time.sleep, LATE_SECONDS))
                device.current.launch(partial(args[0].copy_, args[1].as_subclass(torch.Tensor)))
                return args[0]

        return Rows

    def _request(self, row: int, sender: Any, lists: Lists, span: tuple[int, int], tokens: int) -> Any:
        return SimpleNamespace(
            disagg_kv_sender=sender,
            pending_bootstrap=False,
            start_send_idx=span[0],
            extend_end=span[1],
            extend_range=SimpleNamespace(end=span[1]),
            origin_input_ids=range(tokens),
            kv=SimpleNamespace(req_pool_idx=row),
        )

    def _attention(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> None:
        if self.keeps_up:
            before = self.device.Event()
            before.record()
            before.synchronize()
        if layer.layer_id not in self._launched:  # else it reads what is there
            self._launched.add(layer.layer_id)
            self.device.current.launch(partial(self._write, layer.layer_id))

    def _write(self, layer: int) -> None:
        """What the device does for a layer: the bytes come late."""
        time.sleep(LATE_SECONDS)
        if layer in self.held:
            assert self.go_on.wait(60)
        page, layers = self.source.page_size, self.source.lists.layers
        for part in {"kv", "dsa"} & {*self.source.parts}:
            buffers = self.source.buffers(part)
            for buffer in buffers[layers.index(layer) :: len(layers)]:
                for _, lists, (start, end) in self.chunks:
                    pages = lists.pages[start // page : -(-end // page)]
                    buffer[pages] = self.random.integers(1, 256, (len(pages), buffer.shape[1]), np.uint8)

    def _forward(self, scheduler: Any, batch: Any) -> str:
        """SGLang's ``run_batch``: it launches everything, and waits for nothing."""
        if not self.enters:  # the whole pass is one graph
            for layer in self.source.lists.layers:
                self.device.forwards.launch(partial(self._write, layer))
        for layer in self.enters:
            given = (None, None, None, SimpleNamespace(layer_id=layer), SimpleNamespace(tbo_children=self.tbo_children))
            scheduler.tp_worker.model_runner.attn_backend.forward(*given)
        return "result"

    def run(self) -> None:
        """Launch it. The bytes come later."""
        assert backend.around_run_batch(self._forward, self.scheduler, self.batch) == "result"

    def end(self) -> None:
        """Wait until the device has done everything."""
        self.device.close()


@contextlib.contextmanager
def requests(kind: Callable[[Any], Made] | str, count: int = 1, **more: Any) -> Iterator[tuple[Side, Side, list[Any]]]:
    """Requests whose decode has asked, and for each its two ends and the lists of both."""
    with sides(kind, **more) as ((source,), (target,)):
        made: list[Any] = []
        for number in range(count):
            without = [page for _, _, *lists in made for page in lists[0].pages]
            taken = [page for _, _, *lists in made for page in lists[1].pages]
            ours, theirs = Lists.draw(source, N, 2 + number, without), Lists.draw(target, N, 40 + number, taken)
            made.append((*meet(source, target, next(rooms), theirs, N), ours, theirs))
            made[-1][0].init(len(ours.pages), ours.row)
        yield source, target, made


def eight_layers(_: Any) -> Made:
    pool = make_mha("MHATokenToKVPool", 4, PAGE, "float32", layers=LAYERS)
    pool.k_buffer, pool.v_buffer = ([*map(to_device, each)] for each in (pool.k_buffer, pool.v_buffer))
    made = listed(pool, None, LAYERS, heads=4)
    return made._replace(pools=made.pools._replace(kind=KIND))


def send_chunk(source: Side, request: Any, span: tuple[int, int]) -> None:
    """SGLang sends a chunk, as ever."""
    sender, _, ours, _ = request
    page = source.page_size
    states = ours.states(source, N, 0) if span[1] == N else None
    sender.send(ours.pages[span[0] // page : -(-span[1] // page)], states, num_kv_tokens=span[1] - span[0])


def finish(request: Any) -> None:
    sender, receiver, _, _ = request
    until(receiver.poll, SUCCESS)
    until(sender.poll, SUCCESS)


def compute_whole(source: Any, request: Any) -> None:
    """A forward pass that computes a whole prompt, what SGLang sends after it, and the request's end."""
    batch = Batch(source, [(request[0], request[2], (0, N))])
    batch.run()
    batch.end()
    send_chunk(source, request, (0, N))
    finish(request)


def wrong_layers(source: Side, target: Side, request: Any) -> list[int]:
    """The layers of which other bytes arrived than prefill has."""
    _, _, ours, theirs = request
    pairs = zip(source.buffers("kv"), target.buffers("kv"), strict=True)
    wrong = [not np.array_equal(a[ours.pages], b[theirs.pages]) for a, b in pairs]
    layers = source.lists.layers
    return [layer for place, layer in enumerate(layers) if any(wrong[place :: len(layers)])]


def test_all_of_it_over_the_standin_gpu(tmp_path: Path) -> None:
    """With streams, events and memory of a driver; the real NIXL copies the layers by streams of its own."""
    assert passed_over_standin_gpu(Path(__file__), tmp_path) > len(GROUPS)


@pytest.mark.standin_gpu
@pytest.mark.parametrize("lost", [None, *range(len(GROUPS))])
def test_each_group_waits_for_its_own_event(lost: int | None) -> None:
    """The launching thread is far ahead. An event that passes at once gives wrong bytes of its group, and no other."""
    with requests(eight_layers) as (source, target, [request]):
        source.fill(1)  # what the pages had before
        batch = Batch(source, [(request[0], request[2], (0, N))])
        group = range(0) if lost is None else range([0, *GROUPS][lost], GROUPS[lost])
        batch.held = frozenset(group[:1])
        batch.run()
        _, *groups = batch.device.recorded
        assert len(groups) == len(GROUPS)
        if lost is not None:
            groups[lost].passes_at_once = True
            arrived = target.buffers("kv")[group[0]]
            until(lambda: SUCCESS if arrived[request[3].pages].any(1).all() else WAITING, SUCCESS)
        batch.go_on.set()
        batch.end()
        send_chunk(source, request, (0, N))
        finish(request)
        assert wrong_layers(source, target, request) == [*group]


def pushed(sender: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """What a sender pushes of its chunks: how many of the first layers, and the span."""
    found: list[tuple[int, Any]] = []
    inner = sender.push_layers

    def push_layers(chunk: Any, layers: int, ready: Any) -> None:
        found.append((layers, (chunk.start, chunk.end)))
        inner(chunk, layers, ready)

    monkeypatch.setattr(sender, "push_layers", push_layers)
    return found


def without(batch: Batch) -> None:
    batch.enters = []


def out_of_order(batch: Batch) -> None:
    batch.enters = [1, 0, 2, 3, 6, 5, 4, 7]


def shared(batch: Batch) -> None:
    """Attention is asked several times for a layer, and later layers ask in the name of an earlier one."""
    batch.enters = [0, 0, 1, 2, 3, 4, 4, 5, 6, 7, 3, 2, 3]


def two_halves(batch: Batch) -> None:
    batch.tbo_children = [None, None]
    batch.enters = [0, 1, 0, 1, *range(2, LAYERS)]


def pages_from_the_host(batch: Batch) -> None:
    batch.batch.hicache_consumer_index = 0


def in_parts(batch: Batch) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch.batch.forward_mode = ForwardMode.SPLIT_PREFILL


def before_decode_has_asked(batch: Batch) -> None:
    batch.batch.reqs[0].pending_bootstrap = True


@pytest.mark.parametrize(
    ("case", "groups"),
    [
        (without, [8]),
        (out_of_order, [2, 4, 7, 8]),
        (shared, [2, 4, 6, 7, 8]),
        (two_halves, [8]),
        (pages_from_the_host, [8]),
        (in_parts, []),
        (before_decode_has_asked, []),
    ],
)
@pytest.mark.parametrize("overlap", [True, False])
def test_which_groups_leave(
    case: Callable[[Batch], None], groups: list[int], overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with requests(eight_layers) as (source, target, [request]):
        found = pushed(request[0], monkeypatch)
        batch = Batch(source, [(request[0], request[2], (0, N))])
        batch.scheduler.enable_overlap = overlap
        case(batch)
        batch.run()
        batch.end()
        send_chunk(source, request, (0, N))
        finish(request)
        assert [layers for layers, _ in found] == groups
        assert wrong_layers(source, target, request) == []


@pytest.mark.standin_gpu
def test_chunks_that_sglang_has_not_sent_yet_and_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes are launched before SGLang sends a chunk, which it then does in parts of its own."""
    with requests(eight_layers, 3) as (source, target, made):
        found = pushed(made[0][0], monkeypatch)
        for span in ((0, 48), (48, N)):
            batch = Batch(source, [(request[0], request[2], span) for request in made])
            for each in batch.batch.reqs:
                each.start_send_idx = 0
            batch.run()
            batch.end()
        for request in made:
            for span in ((0, 16), (16, 64), (64, N)):
                send_chunk(source, request, span)
        for request in made:
            finish(request)
            assert wrong_layers(source, target, request) == []
        assert found == [(layers, span) for span in ((0, 48), (48, N)) for layers in GROUPS]


@pytest.mark.parametrize(
    ("count", "keeps_up", "busy", "groups"),
    [
        (5, True, 5, [2, 8]),
        (5, True, 3, [2, 8]),
        (5, True, 2, [*GROUPS]),
        (5, False, 5, [*GROUPS]),
        (4, True, 4, [*GROUPS]),
    ],
    ids=["nothing has arrived", "half has not", "more than half has", "a device that is behind", "few requests"],
)
def test_layers_of_many_requests_wait_for_later_ones_while_the_network_is_busy(
    count: int, keeps_up: bool, busy: int, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with requests(eight_layers, count) as (source, target, made):
        found = pushed(made[-1][0], monkeypatch)
        slow = {request[0] for request in made[:busy]}
        monkeypatch.setattr(type(made[0][0]), "under_way", property(lambda sender: sender in slow))
        batch = Batch(source, [(request[0], request[2], (0, N)) for request in made])
        batch.keeps_up = keeps_up
        batch.run()
        batch.end()
        for request in made:
            send_chunk(source, request, (0, N))
        for request in made:
            finish(request)
            assert wrong_layers(source, target, request) == []
        assert [layers for layers, _ in found] == groups


def test_layers_are_under_way_until_they_have_arrived() -> None:
    with requests(eight_layers) as (source, _, [request]):
        sender = request[0]
        batch = Batch(source, [(sender, request[2], (0, N))])
        batch.held = frozenset({7})
        assert not sender.under_way
        batch.run()
        assert sender.under_way
        batch.go_on.set()
        batch.end()
        until(lambda: WAITING if sender.under_way else SUCCESS, SUCCESS)
        send_chunk(source, request, (0, N))
        finish(request)
        assert not sender.under_way


def test_a_page_that_a_chunk_does_not_fill_leaves_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with requests(eight_layers) as (source, target, [request]):
        found = pushed(request[0], monkeypatch)
        for begin, end in ((0, 50), (48, N)):
            batch = Batch(source, [(request[0], request[2], (begin, end))])
            batch.run()
            batch.end()
            send_chunk(source, request, (begin, end if end == N else 48))
        finish(request)
        assert wrong_layers(source, target, request) == []
        assert {span for _, span in found} == {(0, 48), (48, N)}


@pytest.mark.parametrize(
    ("kind", "components", "groups"),
    [
        ("mla", ("kv",), [1, 2]),
        ("dsa", ("kv", "dsa"), [1, 2]),
        ("minimax", ("kv", "minimax_index_k"), [1, 2, 3, 4]),
        ("swa", ("kv",), [1]),
        ("gdn", ("kv",), [1]),
        ("mxfp8", ("kv",), [1, 2]),
        ("hybrid", ("kv",), [1]),
        ("qsa", ("kv",), [1]),
    ],
)
def test_which_components_leave_by_layers(
    kind: str, components: tuple[str, ...], groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with requests(kind) as (source, target, [request]):
        source.fill(1)
        assert source.lists.layered == components
        found = pushed(request[0], monkeypatch)
        compute_whole(source, request)
        assert [layers for layers, _ in found] == groups
        for part in source.parts:
            sent, arrived = (
                lists.indices(part, side, N, 0) for lists, side in zip(request[2:], (source, target), strict=True)
            )
            for a, b in zip(source.buffers(part), target.buffers(part), strict=True):
                assert np.array_equal(a[sent], b[arrived]), part


def test_a_draft_follows_when_sglang_sends_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    with requests(lambda _: make_with_draft("dsa")) as (source, target, [request]):
        source.fill(1)
        assert (source.lists.layered, source.lists.layers) == (("kv", "dsa"), (0, 1))
        found = pushed(request[0], monkeypatch)
        compute_whole(source, request)
        assert [layers for layers, _ in found] == [1, 2]
        for part in ("kv", "dsa"):
            for a, b in zip(source.buffers(part), target.buffers(part), strict=True):
                assert np.array_equal(a[request[2].pages], b[request[3].pages])


@pytest.mark.skipif(OLDER, reason="these pools are made as SGLang's newest release makes them")
def test_nothing_of_deepseek_v4_leaves_early() -> None:
    with switched("plain") as variant:
        made = make_v4(variant)
        assert backend.describe_pools(made.pools, made.kv_args)[1].layers == ()


def test_layers_that_the_link_has_no_room_for_leave_later() -> None:
    with requests(eight_layers, own=({"max_pushes": 3}, {})) as (source, target, [request]):
        batch = Batch(source, [(request[0], request[2], (0, N))])
        batch.held = frozenset({0})
        batch.run()
        assert source.pushes.drain(60)
        batch.go_on.set()
        batch.end()
        until(lambda: WAITING if source.link.snapshot()["load"]["pushes"] else SUCCESS, SUCCESS)
        send_chunk(source, request, (0, N))
        finish(request)
        assert wrong_layers(source, target, request) == []


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_request_that_ends_between_its_layers(who: str) -> None:
    with requests(eight_layers) as (source, target, [request]):
        sender, receiver, _, _ = request
        batch = Batch(source, [(sender, request[2], (0, N))])
        batch.held = frozenset({5})
        batch.run()
        (sender if who == "prefill" else receiver).abort()
        batch.go_on.set()
        batch.end()
        for each in (sender, receiver):
            poll_until_failed(each)
        hand_over(source, target)


def poll_until_failed(transfer: Any) -> None:
    end = time.monotonic() + 60
    while transfer.poll() != FAILED:
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("end", ["clear", "abort", "failure_exception"])
def test_pages_that_the_prefix_cache_gives_back_are_kept_until_the_request_has_ended(end: str) -> None:
    import torch
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    allocator = PagedTokenToKVPoolAllocator(256, PAGE, torch.float32, "cpu", None, True)
    row = allocator.alloc(5 * PAGE)
    left = allocator.available_size()

    def checkpoint(req: Any, tree: Any) -> str:
        tree.token_to_kv_pool_allocator.free_segment(row[: 2 * PAGE], start_pos=0)
        tree.token_to_kv_pool_allocator.free_segments([(row[2 * PAGE : 3 * PAGE], 2 * PAGE)])
        tree.token_to_kv_pool_allocator.free(row[3 * PAGE : 4 * PAGE])
        return "checkpoint"

    with requests(eight_layers) as (source, _, [request]):
        sender, tree = request[0], SimpleNamespace(token_to_kv_pool_allocator=allocator)
        batch = Batch(source, [(sender, request[2], (0, N))])
        batch.run()
        assert backend.around_checkpoint(checkpoint, batch.batch.reqs[0], tree) == "checkpoint"
        assert allocator.available_size() == left
        row[:] = 0  # SGLang names the cache's pages there
        batch.end()
        with contextlib.suppress(backend.TransferFailed):
            getattr(sender, end)()
        assert allocator.available_size() == left + 4 * PAGE
        allocator.free(allocator.alloc(PAGE))  # its methods are its own again
        assert allocator.available_size() == left + 4 * PAGE
