"""Transfer statuses, whose Python object the library's threads point at and do not own."""

from __future__ import annotations

import enum
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from . import _host


class StatusCode(enum.Enum):
    SUCCESS = 0
    INIT = 1
    IN_PROGRESS = 2
    ERR_INVALID_ARGS = 11
    ERR_NOT_FOUND = 12
    ERR_RDMA_OP = 13
    ERR_BAD_STATE = 14
    ERR_GPU_OP = 15

    def __int__(self) -> int:
        return int(self.value)


FAILED = 10
"""The marker: whatever is above it is a failure."""


class _Holder(Protocol):
    running: bool


class TransferStatus:
    """How one operation goes."""

    def __init__(self) -> None:
        self._code, self._message = StatusCode.INIT, ""
        self._lock = threading.Lock()
        self._holder: Callable[[], _Holder | None] | None = None
        self._event: Callable[[], tuple[StatusCode, str] | None] | None = None

    def Code(self) -> StatusCode:
        self._poll()
        return self._code

    def Message(self) -> str:
        return self._message

    def InProgress(self) -> bool:
        return self.Code() is StatusCode.IN_PROGRESS

    def Succeeded(self) -> bool:
        return self.Code() is StatusCode.SUCCESS

    def Failed(self) -> bool:
        return int(self.Code()) > FAILED

    def Update(self, code: StatusCode, msg: str) -> None:
        """Errors stay; a success may still become one."""
        with self._lock:
            if int(self._code) <= FAILED:
                self._code, self._message = code, msg

    def __del__(self) -> None:
        holder = self._holder() if self._holder is not None else None
        if holder is not None and holder.running and not sys.is_finalizing():
            _host.abort("a TransferStatus was dropped while its operation was in flight")

    def _poll(self) -> None:
        event = self._event() if self._event is not None else None
        if event is not None:
            self._event = self._holder = None
            self.Update(*event)


def begin(status: TransferStatus, holder: _Holder) -> None:
    """The library has it from now on."""
    status._code = StatusCode.IN_PROGRESS
    status._holder = weakref.ref(holder)


def hold(status: TransferStatus, holder: _Holder) -> None:
    """The library has one that failed already."""
    status._holder = weakref.ref(holder)


def watch(status: TransferStatus, event: Callable[[], tuple[StatusCode, str] | None]) -> None:
    """It ends when someone polls it and ``event`` says so."""
    status._event = event


def end(status: TransferStatus | None, code: StatusCode, msg: str) -> None:
    """The library has done with it."""
    if status is not None:
        status._holder = None
        status.Update(code, msg)


def failed(code: StatusCode, msg: str) -> TransferStatus:
    """A refusal: a status that failed before anything happened."""
    status = TransferStatus()
    status.Update(code, msg)
    return status


def done(msg: str = "") -> TransferStatus:
    """What an empty batch gets."""
    status = TransferStatus()
    status.Update(StatusCode.SUCCESS, msg)
    return status
