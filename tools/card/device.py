"""Memory, streams and late kernels of one card: of torch if it reaches the card, otherwise of the driver by ctypes."""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .streams import DriverEvent, DriverStream

__all__ = ["Buffer", "Card", "Event", "cuda_torch"]

Bytes = npt.NDArray[np.uint8]

CYCLES = 1.7e9
"""Cycles of a second of the card's clock, about: torch lets a kernel wait for a number of cycles."""
SIDE, MEASURED = 4096, 50
"""Rows of a matrix, and how many products of two are measured."""


class Event(Protocol):
    """What `push` and `accept` take as ``ready``."""

    def query(self) -> bool:
        """Whether the stream has passed it."""


class Buffer:
    """Memory of the card. It lives as long as this object."""

    def __init__(self, address: int, nbytes: int, held: Any) -> None:
        self.address, self.nbytes, self.held = address, nbytes, held


def cuda_torch() -> Any:
    """torch, if it reaches a card; otherwise ``None``."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


class Card:
    """One card, whose primary context is current in the thread that makes this.

    Args:
        index: Its number.

    Attributes:
        torch: torch, if it reaches the card.
        cuda: The driver.
        kind: Kind of its memory, for Statelink.
    """

    def __init__(self, index: int = 0) -> None:
        self.torch = cuda_torch()
        self.kind = f"cuda:{index}"
        if self.torch is not None:
            self.torch.cuda.set_device(index)
            self.torch.zeros(1, device=self.kind)
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", c_uint(0))
        device, context = c_int(), c_void_p()
        self.call("cuDeviceGet", byref(device), c_int(index))
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.device = device
        self._stream = DriverStream(self)
        self._sources: dict[tuple[int, int], tuple[Buffer, int]] = {}
        self._torch_stream = self.torch.cuda.Stream() if self.torch is not None else None

    def call(self, name: str, *arguments: Any) -> None:
        """Call the driver.

        Raises:
            RuntimeError: It reports an error.
        """
        status = getattr(self.cuda, name)(*arguments)
        if status:
            text = c_char_p()
            self.cuda.cuGetErrorString(c_int(status), byref(text))
            raise RuntimeError(f"{name}: CUDA error {status}: {(text.value or b'').decode()}")

    def free(self) -> int | None:
        """Free bytes of the card; ``None`` if the driver does not say."""
        free, total = c_size_t(), c_size_t()
        if not hasattr(self.cuda, "cuMemGetInfo_v2"):
            return None
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def contexts(self) -> list[int]:
        """The cards on which this process has the primary context."""
        count, found = c_int(), []
        self.call("cuDeviceGetCount", byref(count))
        for number in range(count.value):
            device, flags, active = c_int(), c_uint(), c_int()
            self.call("cuDeviceGet", byref(device), c_int(number))
            self.call("cuDevicePrimaryCtxGetState", device, byref(flags), byref(active))
            found += [number] if active.value else []
        return found

    def buffer(self, nbytes: int) -> Buffer:
        """Allocate memory."""
        if self.torch is not None:
            tensor = self.torch.zeros(nbytes, dtype=self.torch.uint8, device=self.kind)
            self.torch.cuda.synchronize()
            return Buffer(int(tensor.data_ptr()), nbytes, tensor)
        at = c_uint64()
        self.call("cuMemAlloc_v2", byref(at), c_size_t(nbytes))
        made = Buffer(at.value, nbytes, None)
        self.write(made, np.zeros(nbytes, np.uint8))
        return made

    def write(self, buffer: Buffer, data: Bytes) -> None:
        """Copy host bytes into a buffer."""
        self.call("cuMemcpyHtoD_v2", c_uint64(buffer.address), c_void_p(data.ctypes.data), c_size_t(data.nbytes))

    def read(self, buffer: Buffer) -> Bytes:
        """The bytes of a buffer."""
        data = np.empty(buffer.nbytes, np.uint8)
        self.call("cuMemcpyDtoH_v2", c_void_p(data.ctypes.data), c_uint64(buffer.address), c_size_t(data.nbytes))
        return data

    def late(self, buffers: Sequence[Buffer], byte: int, seconds: float, nbytes: int = 0) -> Event:
        """On a stream of its own: wait, then set bytes. Returns at once, with an event behind that.

        Args:
            buffers: What is set.
            byte: To what.
            seconds: For how long the stream is busy before.
            nbytes: How many of the first bytes of each; all of them if 0.
        """
        if self.torch is not None:
            with self.torch.cuda.stream(self._torch_stream):
                self.torch.cuda._sleep(int(seconds * CYCLES))  # noqa: SLF001 - torch has no public kernel that waits
                for each in buffers:
                    each.held[: nbytes or each.nbytes].fill_(byte)
                event: Event = self.torch.cuda.Event()
                event.record(self._torch_stream)  # type: ignore[attr-defined]
            return event
        sources = [self._source(number, nbytes or each.nbytes, byte) for number, each in enumerate(buffers)]
        self._stream.launch(partial(time.sleep, seconds))
        for source, target in zip(sources, buffers, strict=True):
            self._copy(target.address, source.address, source.nbytes)
        passed = DriverEvent(self)
        passed.record(self._stream)
        return passed

    def compute(self, seconds: float) -> None:
        """On the stream of `late`: multiply matrices for about so long; without torch, only wait. Returns at once."""
        if self.torch is None:
            self._stream.launch(partial(time.sleep, seconds))
            return
        multiply, each = self._products
        with self.torch.cuda.stream(self._torch_stream):
            for _ in range(max(1, round(seconds / each))):
                multiply()

    @cached_property
    def _products(self) -> tuple[Any, float]:
        """What launches a product of two matrices, and the seconds that it takes. Blocks while it is measured."""
        torch = self.torch
        matrix = torch.rand((SIDE, SIDE), dtype=torch.bfloat16, device=self.kind)
        product = torch.empty_like(matrix)

        def multiply() -> None:
            torch.mm(matrix, matrix, out=product)

        torch.cuda.synchronize()
        for _ in range(2):  # the first ones also load the library
            began = time.perf_counter()
            for _ in range(MEASURED):
                multiply()
            torch.cuda.synchronize()
            took = time.perf_counter() - began
        return multiply, took / MEASURED

    def _source(self, number: int, nbytes: int, byte: int) -> Buffer:
        """Memory full of one byte. It is allocated once: the driver waits for the streams to allocate memory."""
        source, holds = self._sources.get((number, nbytes), (None, -1))
        if source is None:
            source = self.buffer(nbytes)
        if holds != byte:
            self.write(source, np.full(nbytes, byte, np.uint8))
        self._sources[number, nbytes] = source, byte
        return source

    def finish(self) -> None:
        """Wait for all streams of this object."""
        if self._torch_stream is not None:
            self._torch_stream.synchronize()
        self._stream.finish()

    def differing(self, buffers: Sequence[Buffer], byte: int) -> int:
        """How many bytes are not this one, as a kernel that is started at once sees them."""
        if self.torch is not None:
            return sum(int((each.held != byte).sum().item()) for each in buffers)
        return sum(int((self.read(each) != byte).sum()) for each in buffers)

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        self.call("cuMemcpyAsync", c_uint64(target), c_uint64(source), c_size_t(nbytes), self._stream.handle)
