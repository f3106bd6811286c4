"""Sends, receives and waits on ZeroMQ's sockets, and keeps the interpreter where nothing can block.

Large messages are sent in parts. ZeroMQ then holds little for a connection, and no connection waits for long. A message
whose body fits into a frame has two frames: its kind and its body. A larger message is sent as several messages of
three frames: its kind, a part of the body, and where the part begins, together with the length of the whole.

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
import struct
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import zmq

from statelink.errors import WireError

from ._codec import MAX_FRAME

__all__ = ["Frames", "Parts", "Watch", "cut"]

_MESSAGE_BYTES = 64
"""Size of ``zmq_msg_t``, which is part of ZeroMQ's binary interface."""
USER = b"User-Id"
"""The property of a message that says who is connected: the public key of the peer, as the gate has told ZeroMQ."""
_NOBLOCK, _SNDMORE, _EAGAIN = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.EAGAIN)
"""As plain numbers, because each operation on an enumeration's member costs several calls."""

PART = MAX_FRAME - (1 << 10)
"""Most bytes of a part. It is less than a frame, because encryption adds bytes."""
LEAST_COUNTED_BYTES = 64 << 10
"""Bytes that an unfinished message counts as, if it has fewer. So their number is bounded, too: nobody says when a
connection ends, and a stranger may open one after the other. A link's own has at least one whole part."""
_PLACE = struct.Struct("<QQ")


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


def cut(frames: Sequence[bytes]) -> Iterator[list[bytes]]:
    """The messages in which a kind and a body are sent."""
    kind, body = frames
    if len(body) <= PART:
        yield [kind, body]
        return
    view = memoryview(body)
    for first in range(0, len(body), PART):
        yield [kind, bytes(view[first : first + PART]), _PLACE.pack(first, len(body))]


class _Partial(NamedTuple):
    kind: bytes
    total: int
    body: bytearray

    @property
    def counted(self) -> int:
        return max(len(self.body), LEAST_COUNTED_BYTES)


class Parts:
    """Puts messages together that several connections send in parts. Belongs to one thread.

    Args:
        most: Most bytes of unfinished messages, of all connections together, where each counts as
            `LEAST_COUNTED_BYTES` or more. If there are more, the message of the connection that has been silent for
            longest is dropped, and its sender has to send it again.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._partial: OrderedDict[Hashable, _Partial] = OrderedDict()
        self._counted = 0

    def add(self, connection: Hashable, frames: Sequence[bytes], limit: int) -> list[bytes] | None:
        """Take a part. Return the whole message once it is complete.

        Args:
            connection: The connection over which it came.
            frames: Its three frames.
            limit: Most bytes of a message of its kind.

        Raises:
            WireError: The part does not begin where the last one ended, or the whole message is too large. The earlier
                parts are dropped.
        """
        kind, part, place = frames
        first, total = _PLACE.unpack(place) if len(place) == _PLACE.size else (1, 0)
        known = self._partial.pop(connection, None)
        if known is not None:
            self._counted -= known.counted
        if total > limit:
            raise WireError(f"a message of {total} bytes", cause=f"at most {limit} are taken", code="wire.size")
        if not first:
            known = _Partial(kind, total, bytearray())
        if known is None or (known.kind, known.total, len(known.body)) != (kind, total, first):
            raise WireError("a part of a message does not follow the part before it", code="wire.frames")
        if not part or first + len(part) > total:
            raise WireError("a part of a message does not follow the part before it", code="wire.frames")
        known.body.extend(part)
        if len(known.body) == total:
            return [kind, known.body]  # type: ignore[list-item]  # decoders take any buffer
        self._partial[connection] = known
        self._counted += known.counted
        while self._counted > self._most:
            _, oldest = self._partial.popitem(last=False)
            self._counted -= oldest.counted
        return None

    def forget(self, connection: Hashable) -> None:
        """Drop the unfinished message of a connection."""
        known = self._partial.pop(connection, None)
        if known is not None:
            self._counted -= known.counted
