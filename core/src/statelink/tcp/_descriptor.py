"""What a peer needs to reach this process, and the key on which two peers agree."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from typing import Annotated, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from statelink.errors import TransferError

__all__ = ["MAX_NAME", "MAX_STREAMS", "Descriptor", "digest", "pair_key"]

MAGIC: Final = b"SLTCP"
VERSION: Final = 2
MAX_DESCRIPTOR: Final = 4096
MAX_NAME: Final = 1024
MAX_STREAMS: Final = 64
"""Most connections between two links, in each direction."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach one backend object. It contains no secret, but a peer must get it from its owner, unchanged.

    Attributes:
        link: Name of its link.
        host: IP address of its data port.
        port: Its data port.
        public: Its half of the key agreement: an X25519 public key that was drawn when the backend was opened.
        boot: Boot id of its machine; empty if unknown.
        same_host_copy: Whether it lets others read its memory, and reads the memory of others.
        streams: Most connections between a peer and it, in each direction.
    """

    link: Name
    host: Annotated[str, msgspec.Meta(max_length=64)]
    port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
    public: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    boot: Annotated[str, msgspec.Meta(max_length=64)] = ""
    same_host_copy: bool = False
    streams: Annotated[int, msgspec.Meta(ge=1, le=MAX_STREAMS)] = 1

    def __post_init__(self) -> None:
        ipaddress.ip_address(self.host)

    def near(self, other: Descriptor) -> bool:
        """Whether both say that they are on one machine and that their memory may be read."""
        return self.same_host_copy and other.same_host_copy and self.boot != "" and self.boot == other.boot

    def encode(self) -> bytes:
        """Encode it: magic, version, msgpack."""
        return MAGIC + bytes([VERSION]) + msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, raw: bytes, peer: str) -> Descriptor:
        """Decode the descriptor that ``peer`` sent.

        Raises:
            TransferError: It is none of this backend's, or has another version, or belongs to another link.
        """
        head = len(MAGIC)
        if raw[:head] != MAGIC or not head < len(raw) <= MAX_DESCRIPTOR:
            raise _refused("it is none of this backend's", peer)
        if raw[head] != VERSION:
            raise _refused(f"it has version {raw[head]}, and this side speaks {VERSION}", peer)
        try:
            descriptor = msgspec.msgpack.decode(raw[head + 1 :], type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise _refused(str(error), peer) from error
        if descriptor.link != peer:
            raise _refused(f"it is that of {descriptor.link!r:.80}", peer)
        return descriptor


def pair_key(private: X25519PrivateKey, own: Descriptor, other: Descriptor) -> bytes:
    """The key of a pair of links. Both sides get the same. Computing it needs one of the two private halves.

    It is bound to both names and both public halves.

    Raises:
        TransferError: With the other side's public half, anybody could compute the key.
    """
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(other.public))
    except ValueError as error:  # a point of low order: the shared secret would be zero
        raise _refused("its key is no X25519 key to agree with", other.link) from error
    first, second = sorted((own, other), key=lambda descriptor: descriptor.link)
    info = _framed(
        b"statelink tcp pair", *(part for each in (first, second) for part in (each.link.encode(), each.public))
    )
    return HKDF(SHA256(), length=32, salt=None, info=info).derive(shared)


def digest(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over ``parts``. Each has its length before it, so that different lists give different bytes."""
    return hmac.new(key, _framed(*parts), hashlib.sha256).digest()


def _framed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def _refused(cause: str, peer: str) -> TransferError:
    return TransferError("the peer's descriptor is refused", cause=cause, backend="tcp", peer=peer)
