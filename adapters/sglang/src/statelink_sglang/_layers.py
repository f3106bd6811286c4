"""Prefill sends layers of a chunk while the forward pass that computes them runs.

SGLang tells nobody which layer it has computed. But every layer of attention asks the model's attention backend, also
where the graph of a forward pass is broken at attention. Whoever enters a layer has launched all layers that were
entered before. So the layers leave in groups, each behind an event that is recorded when a layer after them is entered.

What is not sent by then goes when the forward pass has been launched, behind an event of its own: the last group, and
everything where no layer is entered, because the whole pass is one graph, or in a batch of which nothing may go early
(see `Forward`). SGLang sends each chunk itself once its result is there; that brings what is left, such as a draft's
pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ._behaviour import BEHAVIOUR

if TYPE_CHECKING:
    from ._chunk import Chunk
    from ._manager import Manager

__all__ = ["AROUND", "around_checkpoint", "around_run_batch"]

FEW_CHUNKS = 4
"""Requests of a batch of which each group of layers leaves by itself, even where those before it have not arrived."""

_running: Forward | None = None
"""The forward pass that the scheduler's thread launches at this moment."""
_watching: WeakSet[Any] = WeakSet()
"""The methods of attention backends that say which layer they enter."""


class Forward:
    """A forward pass of prefill that is being launched. On the scheduler's thread, but where a method says otherwise.

    Nothing of a batch leaves before the forward pass has been launched in two cases. With two halves of a batch in turn
    (`--enable-two-batch-overlap`), a layer that one half has entered is not complete. While pages come back from the
    host's cache (`--enable-hierarchical-cache`), a page counts as computed before it has arrived.
    """

    def __init__(self, manager: Manager, scheduler: Any, batch: Any) -> None:
        self._manager, self._scheduler, self._batch = manager, scheduler, batch
        self._chunks: list[Chunk] | None = None
        """`None` before the first layer."""
        self._ids: Any = None
        """The chunks' token slots, one for each page, which are being copied to the host."""
        self._copied: Any = None
        self._ends = iter(manager.layer_ends)
        self._due = next(self._ends)
        """How many of the first layers have to be complete for the next group."""
        self._marks = bytearray(len(manager.layer_order))
        self._complete = 0
        self._before: Any = None
        """The event of the last group that has left."""
        self._at = -1
        self._whole = batch.hicache_consumer_index >= 0

    def entered(self, layer: int, forward_batch: Any) -> None:
        """A layer begins to be launched. Attention may be asked several times for one layer.

        A layer that shares the pages of an earlier one asks in that one's name, and writes nothing.
        """
        before = self._at
        if layer == before:
            return
        self._at = layer
        if self._chunks is None:
            self._whole = self._whole or getattr(forward_batch, "tbo_children", None) is not None
            self._chunks = self._begin()
            if self._whole or not self._chunks:
                _stop()
                return
        place = self._manager.layer_places.get(before)
        if place is None:
            return
        self._marks[place] = 1
        while self._complete < len(self._marks) and self._marks[self._complete]:
            self._complete += 1
        if self._complete >= self._due:
            while self._complete >= self._due:
                layers, self._due = self._due, next(self._ends, len(self._marks) + 1)
            if not self._has_enough():
                self._push(layers, None)

    def end(self) -> None:
        """All layers have been launched."""
        if self._chunks is None:
            self._chunks = self._begin()
        if self._chunks and self._due <= len(self._marks):
            scheduler = self._scheduler
            self._push(len(self._marks), scheduler.forward_stream if scheduler.enable_overlap else None)

    def _has_enough(self) -> bool:
        """Whether the network is busy with the groups before until the next one ends, so that this one can wait for it.

        No group has more layers than the one before it. So the network is busy if more than half of the requests still
        wait for what has left of them. That is not known while the device is behind the thread that launches: then
        nothing of the group before has moved. And for few requests, a push costs less than a network with nothing to
        do.
        """
        chunks, before = self._chunks or (), self._before
        if before is None or len(chunks) <= FEW_CHUNKS or not before.query():
            return False
        busy: int = sum(chunk.sender.under_way for chunk in chunks)
        return busy > len(chunks) // 2

    def _begin(self) -> list[Chunk]:
        """The chunks of the batch that may leave, and a copy of their pages, which nobody waits for here."""
        page, table = self._manager.page_size, self._scheduler.req_to_token_pool.req_to_token
        chunks, rows = [], []
        for req in self._batch.reqs:
            # SGLang checks its health with a sender of its own.
            begin = getattr(req.disagg_kv_sender, "begin_layers", None)
            if begin is None or req.pending_bootstrap:
                continue
            tokens = len(req.origin_input_ids)
            end = BEHAVIOUR.computed(req)
            end = tokens if end >= tokens else end - end % page
            chunk = begin(req.start_send_idx, end)
            if chunk is not None:
                chunks.append(chunk)
                rows.append(table[req.kv.req_pool_idx, chunk.start : chunk.end : page])
        if chunks:
            self._copy(rows)
        return chunks

    def _copy(self, rows: Sequence[Any]) -> None:
        """Copy slots to the host, on the stream that wrote them, so that the copy waits for no forward pass."""
        import torch

        device = self._scheduler.device_module
        with device.stream(self._scheduler.schedule_stream):
            joined = torch.cat(list(rows))
            self._ids = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=joined.device.type != "cpu")
            self._ids.copy_(joined, non_blocking=True)
            self._copied = device.Event()
            self._copied.record()

    def _push(self, layers: int, stream: Any) -> None:
        """Have the first so many layers pushed, once everything that has been launched so far has been computed."""
        assert self._chunks is not None
        ready = self._before = self._scheduler.device_module.Event()
        if stream is None:
            ready.record()
        else:
            ready.record(stream)
        for chunk in self._chunks:
            chunk.sender.hand_layers()
        self._manager.pushes.put((self._push_now, (self._chunks, layers, ready)))

    def _push_now(self, chunks: Sequence[Chunk], layers: int, ready: Any) -> None:
        """On the thread of the pushes. It waits for the copy of the pages, which comes before any of the layers."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied, at, page = None, 0, self._manager.page_size
            slots = self._ids.numpy()
            for chunk in chunks:
                count = -(-(chunk.end - chunk.start) // page)
                chunk.pages = slots[at : at + count] // page
                at += count
        for chunk in chunks:
            chunk.sender.push_layers(chunk, layers, ready)


def around_run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *given: Any, **more: Any) -> Any:
    """Around ``Scheduler.run_batch``."""
    global _running
    manager = _manager_of(scheduler)
    mode = batch.forward_mode
    # With --enable-pdmux, a forward pass is launched in parts, by several calls.
    if manager is None or not mode.is_extend() or mode.is_split_prefill():
        return original(scheduler, batch, *given, **more)
    _watch(scheduler.tp_worker.model_runner.attn_backend)
    _running = forward = Forward(manager, scheduler, batch)
    try:
        result = original(scheduler, batch, *given, **more)
    finally:
        _running = None
    forward.end()
    return result


def _stop() -> None:
    """Nothing wants to know any more which layers the forward pass enters."""
    global _running
    _running = None


def _manager_of(scheduler: Any) -> Manager | None:
    """The manager of a prefill server that has layers to send; ``None`` for any other server."""
    queue = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    manager: Manager | None = getattr(queue, "kv_manager", None)
    return manager if getattr(manager, "layer_order", None) else None


def _watch(backend: Any) -> None:
    """Have the model's attention backend say which layer it enters. A draft has a backend of its own."""
    inner = backend.forward
    if inner in _watching:
        return

    def forward(*given: Any, **more: Any) -> Any:
        running = _running
        if running is not None:
            layer, forward_batch = (*given, *[None] * 5)[3:5]
            number = getattr(more.get("layer", layer), "layer_id", more.get("layer_id"))
            if number is not None:
                running.entered(number, more.get("forward_batch", forward_batch))
        return inner(*given, **more)

    backend.forward = forward
    _watching.add(forward)


def around_checkpoint(original: Callable[..., Any], req: Any, tree_cache: Any, **more: Any) -> Any:
    """Around the function with which SGLang's prefix cache takes the pages that a request has computed.

    Where the cache has pages of these positions already, it gives the request's own pages to others. Layers of them may
    still be read, so they are kept until SGLang is done with the request. That is one moment for all ranks: they must
    not differ in how much memory is free.
    """
    sender = req.disagg_kv_sender
    if not getattr(sender, "sends_layers", False):
        return original(req, tree_cache, **more)
    with _keeping(tree_cache.token_to_kv_pool_allocator) as kept:
        result = original(req, tree_cache, **more)
    sender.keep(kept)
    return result


@contextmanager
def _keeping(allocator: Any) -> Iterator[list[Callable[[], object]]]:
    """Within the block, pages that are given back are not: they are when what is in the list is called."""
    kept: list[Callable[[], object]] = []

    def keep(free: Callable[..., object]) -> Callable[..., None]:
        def freed(*given: Any, **more: Any) -> None:
            copied = _copied(given), {name: _copied(each) for name, each in more.items()}
            kept.append(lambda: free(*copied[0], **copied[1]))

        return freed

    names, own = _frees(allocator.__class__), dict(vars(allocator))
    for name in names:
        setattr(allocator, name, keep(getattr(allocator, name)))
    try:
        yield kept
    finally:
        for name in names:
            delattr(allocator, name)
            if name in own:
                setattr(allocator, name, own[name])


@cache
def _frees(allocator: Any) -> tuple[str, ...]:
    """The methods that give pages of the full pool back. Groups of such calls may be open, and stay so."""
    names = (each for each in dir(allocator) if each.startswith("free") and callable(getattr(allocator, each)))
    return tuple(each for each in names if not {"swa", "group"} & {*each.split("_")})


def _copied(given: Any) -> Any:
    """The same arguments, whose tensors nobody changes: SGLang gives slices of a request's row."""
    if isinstance(given, (list, tuple)):
        return type(given)(map(_copied, given))
    return given.clone() if hasattr(given, "clone") else given


AROUND: dict[str, Callable[..., Any]] = {
    "sglang.srt.managers.scheduler.Scheduler.run_batch": around_run_batch,
    f"sglang.srt.mem_cache.common.{BEHAVIOUR.checkpoint}": around_checkpoint,
}
"""Each target, and its hook."""
