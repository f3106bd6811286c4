"""The embedded backend's protocol, spoken by hand: written down a second time, and sharing no code with the backend."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

HEADER = struct.Struct("<4sBxxxI4xQQQQ")
"""Magic, mode, blocks, sequence, room, generation, bytes of all blocks; the blocks' places and sizes follow."""
REPLY = struct.Struct("<4sBxHQ")
"""Magic, status, length of the reason that follows, sequence."""
DONE, REFUSED, FAILED, RESEND = 1, 2, 3, 4
MAGIC = b"SLTCP\x02"
Fields = dict[str, Any]


class Lost(Exception):
    """The other end hung up, or says what is no protocol."""


def frame(kind: str, **fields: Any) -> bytes:
    """A message of the handshake."""
    raw = msgspec.msgpack.encode({"type": kind, **fields})
    return len(raw).to_bytes(2, "little") + raw


def hello(sender: str = "source", receiver: str = "target", number: int = 0) -> bytes:
    """What a caller says first. The first connection need not say its number."""
    said = {"stream": number} if number else {}
    return frame("SLTCP1", sender=sender, receiver=receiver, nonce=bytes(32), **said)


def fields_of(descriptor: bytes) -> Fields:
    assert descriptor.startswith(MAGIC)
    found: Fields = msgspec.msgpack.decode(descriptor[len(MAGIC) :])
    return found


def changed(descriptor: bytes, **fields: Any) -> bytes:
    """A descriptor, with fields changed."""
    return MAGIC + msgspec.msgpack.encode({**fields_of(descriptor), **fields})


def pair_key(private: X25519PrivateKey, own: Fields, other: Fields) -> bytes:
    """The key of two backends, bound to both names and both public halves."""
    shared = private.exchange(X25519PublicKey.from_public_bytes(other["public"]))
    ends = sorted((own, other), key=lambda each: str(each["link"]))
    info = framed(b"statelink tcp pair", *(part for each in ends for part in (each["link"].encode(), each["public"])))
    return HKDF(SHA256(), length=32, salt=None, info=info).derive(shared)


def digest(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, framed(*parts), hashlib.sha256).digest()


def framed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


class Stream:
    """A connection to a data port.

    Attributes:
        copies: Whether the port says that it reads the caller's memory.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.copies = False

    def write(self, data: bytes) -> None:
        with self._losing():
            self._sock.sendall(data)

    def read(self, nbytes: int, timeout: float = 10.0) -> bytes:
        found = b""
        self._sock.settimeout(timeout)
        while len(found) < nbytes:
            with self._losing():
                more = self._sock.recv(nbytes - len(found))
            if not more:
                raise Lost("it hung up")
            found += more
        return found

    def hear(self, kind: str) -> Fields:
        """A message of the handshake."""
        said: Fields = msgspec.msgpack.decode(self.read(int.from_bytes(self.read(2), "little")))
        if said["type"] != kind:
            raise Lost(f"it says {said}")
        return said

    def answer(self) -> tuple[int, int, str]:
        """What became of a WRITE: status, sequence and reason."""
        magic, status, length, sequence = REPLY.unpack(self.read(REPLY.size))
        assert magic == b"SLr1"
        return status, sequence, self.read(length).decode()

    def close(self) -> None:
        self._sock.close()

    def detach(self) -> int:
        """Give the descriptor away. What it sends leaves at once, and whoever closes it resets the connection."""
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return self._sock.detach()

    @staticmethod
    @contextlib.contextmanager
    def _losing() -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Lost(str(error)) from error


class Caller:
    """Somebody who calls data ports, with a name and a key of its own.

    Args:
        link: Its name.
        peer: The descriptor of whom it calls.
    """

    def __init__(self, link: str, peer: bytes) -> None:
        self.private = X25519PrivateKey.generate()
        self.peer = fields_of(peer)
        public = self.private.public_key().public_bytes_raw()
        # Where it says to be near, it is on the machine of the other, which may then read its memory.
        self.own: Fields = {"link": link, "host": "127.0.0.1", "port": 1, "public": public, "boot": self.peer["boot"]}
        self.own["same_host_copy"] = True
        self.key = pair_key(self.private, self.own, self.peer)

    @property
    def descriptor(self) -> bytes:
        return MAGIC + msgspec.msgpack.encode(self.own)

    def plain(self) -> socket.socket:
        """A connection over which nothing was said."""
        sock = socket.create_connection((self.peer["host"], self.peer["port"]))
        sock.settimeout(10)
        return sock

    def dial(self, at: Callable[[bytes], tuple[int, int]] = lambda token: (0, 0), number: int = 0) -> Stream:
        """Make a connection, and prove the key.

        Args:
            number: Its number.
            at: Given the token that only this connection has, the process and the address where it says that it lies.

        Raises:
            Lost: The port does not let it in.
        """
        stream = Stream(self.plain())
        try:
            names = self.own["link"], self.peer["link"]
            stream.write(hello(*names, number))
            challenge = stream.hear("Challenge")
            numbered = (str(number).encode(),) if number else ()
            said = names[0].encode(), names[1].encode(), bytes(32), challenge["nonce"], *numbered
            pid, address = at(digest(self.key, b"memory", *said))
            parts = (*said, str(pid).encode(), str(address).encode())
            stream.write(frame("Proof", proof=digest(self.key, b"sender", *parts), pid=pid, address=address))
            stream.copies = stream.hear("Welcome")["copy"]
            assert challenge["proof"] == digest(self.key, b"receiver", *said), "it let in whom it should not know"
        except BaseException:
            stream.close()
            raise
        return stream

    def admit(self, called: socket.socket, *, copy: bool = False, welcome: bool = True) -> Stream:
        """Let in somebody who calls, as a data port does; ``copy`` says that it would read the caller's memory.

        Without ``welcome``, the last message is left out.

        Raises:
            Lost: It does not hold the key.
        """
        stream = Stream(called)
        first = stream.hear("SLTCP1")
        said = first["sender"].encode(), first["receiver"].encode(), first["nonce"], bytes(32)
        stream.write(frame("Challenge", nonce=bytes(32), proof=digest(self.key, b"receiver", *said)))
        proof = stream.hear("Proof")
        parts = (*said, str(proof["pid"]).encode(), str(proof["address"]).encode())
        if proof["proof"] != digest(self.key, b"sender", *parts):
            raise Lost("it does not hold the key")
        if welcome:
            stream.write(frame("Welcome", copy=copy))
        return stream
