"""Proofs that whoever speaks to a bootstrap server holds a key.

A link's key is one of CURVE, which is one of X25519. A rank and the server agree on a secret with their pairs of keys.
The rank authenticates what it says with this secret, which nobody else can compute. The server's pair is drawn with
each start, so it needs no secret from its configuration.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

import zmq.utils.z85
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from statelink import Keys
from statelink.errors import ConfigError

__all__ = ["KeyPair", "allowed", "key_in"]

PURPOSE = b"statelink-sglang bootstrap"
"""Keeps these secrets apart from all others that are agreed on with a link's key."""


class KeyPair:
    """A pair of keys. Thread-safe, and does not block.

    Args:
        keys: The link's. Without them, a pair is drawn: it proves only that two messages come from one process.

    Attributes:
        public: The public key, 40 characters of Z85, as in allow-lists.
    """

    def __init__(self, keys: Keys | None = None) -> None:
        if keys is None:
            self._private = X25519PrivateKey.generate()
        else:
            self._private = X25519PrivateKey.from_private_bytes(_raw(keys.secret))
        self.public = zmq.utils.z85.encode(self._private.public_key().public_bytes_raw()).decode()

    def prove(self, server: str, path: str, body: bytes) -> str:
        """A proof for a server, to be sent with ``body``: 64 hexadecimal digits.

        Raises:
            ValueError: ``server`` is no public key.
        """
        return self._code(server, f"{self.public} {server} {path}", body)

    def is_proven(self, rank: str, proof: str, path: str, body: bytes) -> bool:
        """Whether the holder of the key ``rank`` made a proof for this pair, path and body."""
        try:
            made = self._code(rank, f"{rank} {self.public} {path}", body)
        except ValueError:
            return False
        return hmac.compare_digest(made.encode(), proof.encode(errors="replace"))

    def _code(self, other: str, about: str, body: bytes) -> str:
        shared = self._private.exchange(X25519PublicKey.from_public_bytes(_raw(other)))
        key = HKDF(SHA256(), length=32, salt=None, info=PURPOSE).derive(shared)
        return hmac.new(key, about.encode() + b"\n" + body, hashlib.sha256).hexdigest()


def allowed(keys: Keys | None) -> frozenset[str] | None:
    """The public keys that a link with these keys takes for members of its fleet; ``None`` without keys."""
    return None if keys is None else frozenset((keys.public, *keys.allow))


def key_in(address: str) -> str:
    """The public key in a link's address, in Z85; empty if it has none.

    Raises:
        ValueError: What stands for the key is none.
    """
    try:
        return Keys.in_address(address)
    except ConfigError as error:
        raise ValueError(error.reason.what) from error


def _raw(key: str) -> bytes:
    """The 32 bytes of a key in Z85.

    Raises:
        ValueError: It is none.
    """
    try:
        raw = zmq.utils.z85.decode(key.encode("ascii"))
    except (KeyError, ValueError, struct.error) as error:
        raise ValueError("a key has 40 characters of Z85") from error
    if len(raw) != 32:
        raise ValueError("a key has 40 characters of Z85")
    return raw
