"""Stands in for a card: what was launched on a stream is done later, in order, while the launching thread goes on."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

__all__ = ["Device", "Event", "Stream"]


class Stream:
    """Does what was launched, one after the other, on a thread of its own."""

    def __init__(self) -> None:
        self._launched: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def launch(self, work: Callable[[], object]) -> None:
        self._launched.put(work)

    def close(self) -> None:
        self._launched.put(None)
        self._thread.join(60)

    def _run(self) -> None:
        while (work := self._launched.get()) is not None:
            work()


class Event:
    """Passes when its stream has done what was launched before it was recorded."""

    def __init__(self, device: Device) -> None:
        self._device, self._passed = device, threading.Event()
        self.passes_at_once = False
        """As if nobody had recorded it."""

    def record(self, stream: Stream | None = None) -> None:
        (stream or self._device.current).launch(self._passed.set)
        self._device.recorded.append(self)

    def query(self) -> bool:
        return self.passes_at_once or self._passed.is_set()

    def synchronize(self) -> None:
        assert self._passed.wait(60)


class Device:
    """What SGLang and the adapter call of ``torch.cuda``.

    Attributes:
        schedules: The stream of the scheduler.
        forwards: The stream of forward passes.
        current: The stream on which something is launched.
        recorded: All events.
    """

    def __init__(self) -> None:
        self.schedules, self.forwards = Stream(), Stream()
        self.current = self.forwards
        self.recorded: list[Event] = []

    def Event(self) -> Event:
        return Event(self)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def close(self) -> None:
        for each in (self.schedules, self.forwards):
            each.close()
