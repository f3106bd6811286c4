"""What lives in a worker process of the kit, and what is found there."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from statelink.backend import Outcome, Transfer
from statelink.errors import StatelinkError

from ._window import view

if TYPE_CHECKING:
    import statelink
    from statelink._devices import DeviceMemory
    from statelink.backend import Backend, Batch

    from ._memory import Array

__all__ = [
    "WORDLESS",
    "Finding",
    "Host",
    "Hung",
    "Opened",
    "Unexpected",
    "called",
    "outcome_of",
    "returning",
    "transfer_of",
    "unexpected",
]

REST_SECONDS = 0.0002
"""Seconds between two polls of a transfer."""


KIT = os.path.dirname(os.path.abspath(__file__))
ENDLESS = "Set the outcome of every transfer once it has ended or failed, on a thread of yours or in `poll`."
RAISED = "The backend raised what is no error of Statelink's: raise a `TransferError` with the library's reason."
WORDLESS = "Give each failure a reason: `Transfer.fail` takes it, in the library's own words."
RETURNS = {
    "disconnect": "Let `disconnect` never raise: it forgets a peer, and ignores one that it does not know.",
    "close": "Let `close` never raise: it frees what there is, and the second time there is nothing.",
}
"""What to do about a method that raises although it must return."""


class _Told(Exception):
    """It may have a hint of its own, where that of the clause does not suit.

    Args:
        words: What happened.
        todo: What to do about it; by default, the hint of the clause.
        general: Whether any clause could have found this. The clause's own hint then only counts if no other does.
    """

    def __init__(self, words: str, todo: str = "", general: bool = False) -> None:
        super().__init__(words, todo, general)
        self.todo = todo
        self.general = general

    def __str__(self) -> str:
        return str(self.args[0])


class Finding(_Told, AssertionError):
    """What was found, in words."""


class Unexpected(_Told):
    """A call did what no call may do: for example, it raised an error that is none of Statelink's own."""


class Hung(Unexpected):
    """Nothing happened for too long. The kit ends, because later clauses would wait as long."""

    def __init__(self, words: str, todo: str = ENDLESS, general: bool = True) -> None:
        super().__init__(words, todo, general)


class Opened:
    """A backend, and the lock that serialises its calls if it is not thread-safe."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        free = backend.capabilities.thread_safe
        self.turn: AbstractContextManager[Any] = nullcontext() if free else threading.RLock()

    def submit(self, peer: str, batch: Batch) -> Transfer:
        """Submit a batch, and check that the result is a transfer."""
        with self.turn:
            return transfer_of("submit", self.backend.submit(peer, batch))

    def ended(self, transfer: Transfer, patience: float, *, rest: float = REST_SECONDS) -> Outcome:
        """Poll until a transfer has ended, and return its outcome. Sleeps ``rest`` seconds between two polls.

        Raises:
            Hung: It did not end within ``patience`` seconds.
            Unexpected: Its outcome is no `Outcome`.
            Finding: It failed without a reason.
        """
        until = time.monotonic() + patience
        while transfer.outcome is None:
            with self.turn:
                self.backend.poll([transfer])
            if transfer.outcome is None:
                if time.monotonic() > until:
                    raise Hung(f"a transfer did not end within {patience:g} s")
                if rest:
                    time.sleep(rest)
        return outcome_of(transfer)


def transfer_of(method: str, made: Any) -> Transfer:
    """The result of a method that returns a transfer.

    Raises:
        Unexpected: It is none.
    """
    if not isinstance(made, Transfer):
        found = "None" if made is None else f"an object of type {type(made).__name__}"
        raise Unexpected(f"`{method}` returned {found}, and not a `Transfer`", f"Return a `Transfer` from `{method}`.")
    return made


def outcome_of(transfer: Transfer) -> Outcome:
    """The outcome of a transfer that has ended.

    Raises:
        Unexpected: It is no `Outcome`.
        Finding: It is a failure without a reason.
    """
    outcome: object = transfer.outcome
    if not isinstance(outcome, Outcome):
        todo = "Set `Transfer.outcome` to an `Outcome`; `succeed` and `fail` do so."
        raise Unexpected(f"`Transfer.outcome` is {outcome!r:.60}, and not an `Outcome`", todo)
    if not (outcome.ok or str(outcome.reason).strip()):
        raise Finding("a transfer failed without a reason", WORDLESS, general=True)
    return outcome


class Host:
    """The objects of a worker: backends by the name of their link, and data of the functions that run here.

    Args:
        path: File that this process maps as the worker's memory.

    Attributes:
        kind: Kind of the worker's memory, such as ``dram``.
        address: Address of its first byte, in this process.
        allocate: Allocates more memory of this kind, in bytes; ``None`` for host memory.
    """

    def __init__(self, path: str) -> None:
        self.kind = "dram"
        self._memory = view(path)
        self.address = int(self._memory.ctypes.data)
        self.allocate: Callable[[int], DeviceMemory] | None = None
        self.backends: dict[str, Opened] = {}
        self.links: dict[str, statelink.Link] = {}
        self.rooms: dict[tuple[str, int], statelink.Room] = {}
        self.kept: dict[str, Any] = {}
        self._views: dict[str, Array] = {}

    def on(self, kind: str, address: int, allocate: Callable[[int], DeviceMemory]) -> None:
        """Use memory of a device as the worker's memory. The arguments become the attributes."""
        self.kind, self.address, self.allocate = kind, address, allocate

    def view(self, path: str) -> Array:
        """The memory of another worker, in this process."""
        return self._views.setdefault(path, view(path))

    def close_all(self) -> None:
        """Close every link and backend, even if one of them raises. Then raises the first error, if there was one."""
        links, self.links = self.links, {}
        backends, self.backends = self.backends, {}
        self.rooms.clear()
        self.kept.clear()
        self._views.clear()
        failures: list[BaseException] = []
        closers: list[Callable[[], object]] = [link.close for link in links.values()]
        closers += [returning("close")(held.backend.close) for held in backends.values()]
        for close in closers:
            try:
                close()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]


def called(host: Host, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call a function of the kit in the worker.

    Raises:
        Unexpected: It raised what is no error of Statelink's.
    """
    try:
        return function(host, *arguments)
    except (StatelinkError, Unexpected, Finding):
        raise
    except Exception as error:
        raise unexpected(error) from None


@contextlib.contextmanager
def returning(method: str) -> Iterator[None]:
    """Call a method of a backend that must not raise.

    Raises:
        Unexpected: It raised what is no error of Statelink's.
    """
    try:
        yield
    except (StatelinkError, Unexpected, Finding):
        raise
    except Exception as error:
        raise unexpected(error, RETURNS[method]) from None


def unexpected(error: BaseException, todo: str = RAISED) -> Unexpected:
    """An error that is none of Statelink's, with the part of its traceback that is not in the kit.

    ``todo`` says what to do about it.
    """
    told = traceback.TracebackException.from_exception(error)
    outside = any(map(_is_outside, told.stack))
    each: traceback.TracebackException | None = told
    while outside and each is not None:
        each.stack[:] = filter(_is_outside, each.stack)
        each = each.__cause__ or each.__context__
    return Unexpected(f"{type(error).__name__}: {error}\n{''.join(told.format())}", todo if outside else "")


def _is_outside(frame: traceback.FrameSummary) -> bool:
    return os.path.dirname(os.path.abspath(frame.filename)) != KIT
