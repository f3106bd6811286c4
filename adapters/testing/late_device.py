"""Stands in for a card: what was launched on a stream is done later, in order, while the launching thread goes on.

A stream is a thread, and memory is the host's. In a process over the stand-in GPU (`standin_gpu`), streams, events and
memory are those of its driver: the host cannot touch the memory, and a backend copies it by streams of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
from collections.abc import Callable, Iterator
from ctypes import c_uint64, c_void_p
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tools.card.device import Card

__all__ = ["BACKEND", "KIND", "Device", "Event", "Stream", "as_kernels_see", "reachable", "to_device"]

OVER_DRIVER = "STANDIN_GPU" in os.environ
KIND = "cuda:0" if OVER_DRIVER else "dram"
"""The kind of the device's memory."""
BACKEND = "nixl" if OVER_DRIVER else "tcp"
"""A backend that moves it."""
SECONDS = 60.0


class Stream(Protocol):
    """Does what was launched, one after the other, on a thread of its own."""

    def launch(self, work: Callable[[], object]) -> None:
        """Have something done after all that was launched before. Does not block."""

    def finish(self) -> None:
        """Wait until all of it is done."""


class ThreadStream:
    def __init__(self) -> None:
        self._launched: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def launch(self, work: Callable[[], object]) -> None:
        self._launched.put(work)

    def finish(self) -> None:
        self._launched.put(None)
        self._thread.join(SECONDS)

    def _run(self) -> None:
        while (work := self._launched.get()) is not None:
            work()


class ThreadEvent:
    def __init__(self) -> None:
        self._passed = threading.Event()

    def record(self, stream: Stream) -> None:
        stream.launch(self._passed.set)

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        assert self._passed.wait(SECONDS)


class Event:
    """Passes when its stream has done what was launched before it was recorded."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._event: Any = _streams().DriverEvent(_card()) if OVER_DRIVER else ThreadEvent()
        self._recorded = False
        self.passes_at_once = False
        """As if nobody waited for it."""

    def record(self, stream: Stream | None = None) -> None:
        """Record it on a stream; on the device's current one by default."""
        self._event.record(stream or self._device.current)
        self._recorded = True
        self._device.recorded.append(self)

    def query(self) -> bool:
        """Whether it has passed."""
        return self._recorded and (self.passes_at_once or bool(self._event.query()))

    def synchronize(self) -> None:
        """Wait until it has passed."""
        self._event.synchronize()


class Device:
    """What engines and the adapters call of ``torch.cuda``.

    Attributes:
        schedules: The stream of a scheduler.
        forwards: The stream of forward passes.
        current: The stream on which something is launched.
        recorded: All events.
    """

    def __init__(self) -> None:
        self.schedules, self.forwards = _stream(), _stream()
        self.current = self.forwards
        self.recorded: list[Event] = []

    def Event(self) -> Event:
        """An event of the device."""
        return Event(self)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Within the block, the current stream is this one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def close(self) -> None:
        """Wait until everything that was launched is done."""
        for each in (self.schedules, self.forwards):
            each.finish()


def to_device(tensor: Any) -> Any:
    """The same bytes in memory of the device. Nobody may touch them but by `as_kernels_see`."""
    if not OVER_DRIVER:
        return tensor
    buffer = _card().buffer(tensor.nbytes)
    made = _tensor(buffer.address, tensor.nbytes, tensor.dtype).view(tensor.shape).as_subclass(_on_card())
    as_kernels_see(made).copy_(tensor)
    return made


def as_kernels_see(tensor: Any) -> Any:
    """A tensor of the device as its kernels see it."""
    if not OVER_DRIVER:
        return tensor
    storage = tensor.untyped_storage()
    whole = _tensor(reachable(storage.data_ptr()), storage.nbytes(), tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def reachable(address: int) -> int:
    """Where kernels of the device find the byte of an address."""
    if not OVER_DRIVER:
        return address
    find = _card().cuda.standinReachable
    find.restype = c_void_p
    return int(find(c_uint64(address)))


def _stream() -> Stream:
    made: Stream = _streams().DriverStream(_card()) if OVER_DRIVER else ThreadStream()
    return made


def _streams() -> Any:
    from tools.card import streams

    return streams


@cache
def _card() -> Card:
    from tools.card.device import Card

    return Card()


def _tensor(address: int, nbytes: int, dtype: Any) -> Any:
    import torch

    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=dtype)


@cache
def _on_card() -> Any:
    import torch

    class OnCard(torch.Tensor):
        """Says that it is on a device, as torch without CUDA cannot."""

        device = torch.device(KIND)

    return OnCard
