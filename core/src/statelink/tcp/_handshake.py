"""The set-up of a data connection: both sides prove who they are, and decide whether memory is read instead of sent.

::

    sender                                          receiver
      Hello(sender, receiver, nonce)  ------------>
                                      <------------  Challenge(nonce, proof of the key)
      Proof(proof of the key, pid, address)  ------>
                                      <------------  Welcome(copy)

Where memory cannot be read, batches follow the proof at once, since the receiver is known by then. Otherwise the sender
waits for `Welcome`, which says how they travel.

Both sides prove that they hold the pair's key. The proofs cover all earlier messages. At ``address`` the sender has put
a token that only this connection has. If the receiver reads the token there, it can read that process's memory, and
``pid`` means the same process to both sides (which is not so across pid namespaces). The token is fresh. With a
constant, a peer could name the memory of another process.

Nothing is encrypted, and the payload has no authentication code. After the set-up, the network is trusted.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec
import numpy as np

from . import _iovec
from ._descriptor import MAX_NAME, MAX_STREAMS, Descriptor, digest
from ._stream import POLLOUT, Lost, Stream, Waker, prepare

if TYPE_CHECKING:
    from ._options import Options

__all__ = [
    "Challenge",
    "Hello",
    "Proof",
    "Welcome",
    "challenge",
    "decode",
    "dial",
    "frame",
    "take",
    "token_is_readable",
    "verify",
]

PREFIX: Final = 2
"""The length before each frame of the set-up, as a little-endian uint16."""
MAX_FRAME: Final = 16 * MAX_NAME
TOKEN: Final = 32

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Hello(msgspec.Struct, frozen=True, tag="SLTCP1"):
    """The names of the sender and of the receiver that it wants, and the number of the connection between them."""

    sender: Name
    receiver: Name
    nonce: Digest
    stream: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STREAMS)] = 0


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """The receiver's proof, and the nonce that the sender's proof has to cover."""

    nonce: Digest
    proof: Digest


class Proof(msgspec.Struct, frozen=True, tag=True):
    """The sender's proof, and the address of its token. ``pid`` is 0 if its memory must not be read."""

    proof: Digest
    pid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    address: Annotated[int, msgspec.Meta(ge=0)]


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The receiver takes batches. ``copy`` says that it can read the sender's memory."""

    copy: bool


Message = TypeVar("Message", Hello, Challenge, Proof, Welcome)


def frame(message: Hello | Challenge | Proof | Welcome) -> bytes:
    """Encode a message as a frame."""
    raw = msgspec.msgpack.encode(message)
    return len(raw).to_bytes(PREFIX, "little") + raw


def decode(raw: bytes, kind: type[Message]) -> Message:
    """Decode the message in a frame without its prefix.

    Raises:
        Lost: It is no message of this kind.
    """
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # also for invalid text and deep nesting
        raise Lost(f"it does not speak this protocol ({error})") from error


def take(received: bytearray, kind: type[Message]) -> Message | None:
    """Take the first frame away from what was received. ``None`` while it is not complete.

    Raises:
        Lost: It is no message of this kind.
    """
    end = PREFIX + _length(received) if len(received) >= PREFIX else len(received) + 1
    if len(received) < end:
        return None
    message = decode(bytes(received[PREFIX:end]), kind)
    del received[:end]
    return message


def challenge(key: bytes, hello: Hello) -> Challenge:
    """The receiver's answer to ``hello``."""
    nonce = secrets.token_bytes(32)
    return Challenge(nonce, digest(key, b"receiver", *_said(hello, nonce)))


def verify(key: bytes, hello: Hello, nonce: bytes, proof: Proof) -> bool:
    """Whether the sender holds the key."""
    expected = digest(key, b"sender", *_said(hello, nonce), str(proof.pid).encode(), str(proof.address).encode())
    return hmac.compare_digest(expected, proof.proof)


def token_is_readable(key: bytes, hello: Hello, nonce: bytes, proof: Proof) -> bool:
    """Whether the sender's token can be read at the address that the sender named."""
    try:
        seen = _iovec.read_memory(proof.pid, proof.address, TOKEN) if proof.pid else b""
    except OSError:
        return False
    return hmac.compare_digest(seen, _token(key, hello, nonce))


def dial(
    own: Descriptor,
    peer: Descriptor,
    key: bytes,
    number: int,
    options: Options,
    waker: Waker,
    check: Callable[[], None],
    *,
    patient: bool = True,
) -> tuple[Stream, bool | None]:
    """Make connection ``number`` to ``peer`` and authenticate.

    Returns the stream, and whether the receiver reads this side's memory. The latter is ``None`` where it cannot, and
    the receiver's `Welcome` comes later.

    A peer may hang up because it does not know this side yet, or has too many connections. So a ``patient`` attempt is
    repeated until ``connect_timeout``.

    Raises:
        Lost: The peer cannot be reached, or is not who it should be.
        Interrupted: As ``check`` says.
    """
    deadline = time.monotonic() + options.connect_timeout
    pause = 0.02
    while True:
        try:
            return _dial(own, peer, key, number, options, waker, check, deadline)
        except Lost as lost:
            if not (lost.ended and patient) or time.monotonic() + pause > deadline:
                raise Lost(f"cannot reach it at {peer.host} port {peer.port}: {lost}", ended=True) from lost
        waker.wait(pause)
        check()
        pause = min(2 * pause, 0.5)


def _dial(
    own: Descriptor,
    peer: Descriptor,
    key: bytes,
    number: int,
    options: Options,
    waker: Waker,
    check: Callable[[], None],
    deadline: float,
) -> tuple[Stream, bool | None]:
    with contextlib.ExitStack() as undo:
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in peer.host else socket.AF_INET)
            undo.callback(sock.close)
            prepare(sock, options)
            error = sock.connect_ex((peer.host, peer.port))
        except OSError as failed:  # the process has no descriptors left, or no addresses
            raise Lost(str(failed)) from failed
        stream = Stream(sock, waker, check)
        while error in (errno.EINPROGRESS, errno.EALREADY, errno.EINTR):
            if stream.wait(POLLOUT, deadline):
                error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise Lost(os.strerror(error))
        copy = _introduce(stream, own, peer, key, number, deadline)
        undo.pop_all()
        return stream, copy


def _introduce(
    stream: Stream, own: Descriptor, peer: Descriptor, key: bytes, number: int, deadline: float
) -> bool | None:
    hello = Hello(own.link, peer.link, secrets.token_bytes(32), number)
    stream.write(frame(hello), deadline)
    answer = decode(_read(stream, deadline), Challenge)
    if not hmac.compare_digest(digest(key, b"receiver", *_said(hello, answer.nonce)), answer.proof):
        raise Lost("whoever listens there does not hold the key of this pair")
    # The token must stay at its address until this returns.
    token = np.frombuffer(_token(key, hello, answer.nonce), np.uint8)
    near = own.near(peer)
    pid, address = (os.getpid(), token.ctypes.data) if near else (0, 0)
    parts = (*_said(hello, answer.nonce), str(pid).encode(), str(address).encode())
    stream.write(frame(Proof(digest(key, b"sender", *parts), pid, address)), deadline)
    return decode(_read(stream, deadline), Welcome).copy if near else None


def _read(stream: Stream, deadline: float) -> bytes:
    prefix = bytearray(PREFIX)
    stream.read(memoryview(prefix), deadline)
    raw = bytearray(_length(prefix))
    stream.read(memoryview(raw), deadline)
    return bytes(raw)


def _length(received: bytearray) -> int:
    length = int.from_bytes(received[:PREFIX], "little")
    if not 0 < length <= MAX_FRAME:
        raise Lost(f"it does not speak this protocol (a frame of {length} bytes)")
    return length


def _said(hello: Hello, nonce: bytes) -> tuple[bytes, ...]:
    said = hello.sender.encode(), hello.receiver.encode(), hello.nonce, nonce
    return (*said, str(hello.stream).encode()) if hello.stream else said


def _token(key: bytes, hello: Hello, nonce: bytes) -> bytes:
    return digest(key, b"memory", *_said(hello, nonce))
