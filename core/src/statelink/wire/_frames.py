"""Sends, receives and waits on ZeroMQ's sockets, and keeps the interpreter where nothing can block.

A call of pyzmq lets go of the interpreter for each frame. If another thread of the process computes, such as an
engine's scheduler, the calling thread may get it back only after the switch interval of 5 ms. A call of ZeroMQ that
does not block takes about a microsecond, so that nothing is gained by letting go. Here such calls are made through
`ctypes.PyDLL`, which keeps the interpreter. Without the C library behind pyzmq, pyzmq's own calls are used.

Every function belongs to the thread that owns the sockets.
"""

from __future__ import annotations

import ctypes
import errno
import math
from collections.abc import Sequence
from typing import Any

import zmq

__all__ = ["Frames", "Watch"]

_MESSAGE_BYTES = 64
"""Size of ``zmq_msg_t``, which is part of ZeroMQ's binary interface."""
USER = b"User-Id"
"""The property of a message that says who is connected: the public key of the peer, as the gate has told ZeroMQ."""
_NOBLOCK, _SNDMORE, _EAGAIN = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.EAGAIN)
"""As plain numbers, because each operation on an enumeration's member costs several calls."""


class _Item(ctypes.Structure):
    """``zmq_pollitem_t``."""

    _fields_ = (
        ("socket", ctypes.c_void_p),
        ("fd", ctypes.c_int),
        ("events", ctypes.c_short),
        ("revents", ctypes.c_short),
    )


class _Calls:
    """Functions of the C library that pyzmq uses.

    Args:
        path: A library that is, or is linked with, ZeroMQ.

    Raises:
        OSError: It cannot be loaded.
        AttributeError: It lacks a function.
    """

    def __init__(self, path: str) -> None:
        keeping, letting = ctypes.PyDLL(path), ctypes.CDLL(path)
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

        def function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
            found = getattr(library, name)
            found.restype, found.argtypes = result, arguments
            return found

        self.send = function(keeping, "zmq_send", number, pointer, ctypes.c_char_p, size, number)
        self.begin = function(keeping, "zmq_msg_init", number, pointer)
        self.receive = function(keeping, "zmq_msg_recv", number, pointer, pointer, number)
        self.data = function(keeping, "zmq_msg_data", pointer, pointer)
        self.copy = function(ctypes.pythonapi, "PyBytes_FromStringAndSize", ctypes.py_object, pointer, ctypes.c_ssize_t)
        self.more = function(keeping, "zmq_msg_more", number, pointer)
        self.property = function(keeping, "zmq_msg_gets", ctypes.c_char_p, pointer, ctypes.c_char_p)
        self.end = function(keeping, "zmq_msg_close", number, pointer)
        self.errno = function(keeping, "zmq_errno", number)
        self.look = function(keeping, "zmq_poll", number, pointer, number, ctypes.c_long)
        self.wait = function(letting, "zmq_poll", number, pointer, number, ctypes.c_long)

    def check(self) -> None:
        """Raise the error of the last call. Returns if a signal interrupted that call: the caller then repeats it."""
        number = int(self.errno())
        if number != errno.EINTR:
            raise zmq.ZMQError(number)


def _load() -> _Calls | None:
    try:
        from zmq.backend.cython import _zmq

        return _Calls(_zmq.__file__)
    except (ImportError, OSError, AttributeError):
        return None


_calls = _load()


class Frames:
    """Sends and receives the messages of several sockets.

    Args:
        named: Whether messages may have the property `USER`. Without security, none has it.
    """

    def __init__(self, *, named: bool) -> None:
        self._named = named
        self._message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._address = ctypes.addressof(self._message)
        if _calls is not None:
            _calls.begin(self._address)

    def send(self, socket: zmq.Socket[Any], frames: Sequence[bytes]) -> None:
        """Queue a message. Does not block.

        Raises:
            zmq.ZMQError: The socket takes no message now, it is closed, or it is a router without such a peer.
        """
        if _calls is None:
            socket.send_multipart(frames, zmq.NOBLOCK)
            return
        handle, send, following = _handle(socket), _calls.send, len(frames)
        for frame in frames:
            following -= 1
            flags = _NOBLOCK | _SNDMORE if following else _NOBLOCK
            while send(handle, frame, len(frame), flags) < 0:
                _calls.check()

    def receive(self, socket: zmq.Socket[Any]) -> tuple[list[bytes], str, int] | None:
        """Take the next message: its frames, its property `USER`, which is empty without security, and its length.

        ``None`` if there is none. Does not block.

        Raises:
            zmq.ZMQError: The socket is closed.
        """
        if _calls is None:
            return _receive(socket)
        handle, message, calls = _handle(socket), self._address, _calls
        frames: list[bytes] = []
        total = 0
        while True:
            nbytes = calls.receive(message, handle, _NOBLOCK)
            if nbytes < 0:
                if not frames and calls.errno() == _EAGAIN:
                    return None
                calls.check()
                continue
            frames.append(calls.copy(calls.data(message), nbytes))
            total += nbytes
            if not calls.more(message):
                user = calls.property(message, USER) if self._named else None
                return frames, user.decode(errors="replace") if user else "", total

    def close(self) -> None:
        """Free the last message. Nothing is received after it."""
        if _calls is not None:
            _calls.end(self._address)


def _receive(socket: zmq.Socket[Any]) -> tuple[list[bytes], str, int] | None:
    """The same with pyzmq."""
    try:
        received = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    try:
        user = str(received[-1].get(USER.decode()))
    except zmq.ZMQError:
        user = ""
    frames = [frame.bytes for frame in received]
    return frames, user, sum(map(len, frames))


def _handle(socket: zmq.Socket[Any]) -> int:
    if socket.closed:
        raise zmq.ZMQError(zmq.ENOTSOCK)
    return int(socket.underlying)


class Watch:
    """Waits until sockets or descriptors are readable."""

    def __init__(self) -> None:
        self._watched: list[zmq.Socket[Any] | int] = []
        self._items = (_Item * 0)()
        self._count = 0

    def add(self, watched: zmq.Socket[Any] | int) -> None:
        """Watch a socket or a descriptor, until `remove`."""
        self._watched.append(watched)
        self._list()

    def remove(self, watched: zmq.Socket[Any] | int) -> None:
        """Watch it no longer. Call this before it is closed."""
        self._watched.remove(watched)
        self._list()

    def _list(self) -> None:
        self._count = len(self._watched)
        self._items = (_Item * self._count)()
        for item, watched in zip(self._items, self._watched, strict=True):
            item.events = zmq.POLLIN
            if isinstance(watched, int):
                item.fd = watched
            else:
                item.socket = watched.underlying

    def wait(self, timeout: float | None) -> list[zmq.Socket[Any] | int]:
        """What is readable, once something is, or after ``timeout`` seconds (``None``: after any time)."""
        milliseconds = -1
        if timeout is not None:
            milliseconds = math.ceil(timeout * 1000) if timeout > 0 else 0
        if _calls is None:
            found = zmq.zmq_poll([(each, zmq.POLLIN) for each in self._watched], milliseconds)
            return [watched for watched, _ in found]
        items, count = self._items, self._count
        # If something is readable already, the interpreter is kept.
        found = _calls.look(items, count, 0)
        if found == 0 and milliseconds:
            found = _calls.wait(items, count, milliseconds)
        if found < 0:
            _calls.check()
        if found <= 0:
            return []
        ready = []
        for item, watched in zip(items, self._watched, strict=True):
            if item.revents:
                ready.append(watched)
        return ready
