"""Who may speak: keys, addresses that carry them, and what is refused without."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.utils.z85

from statelink.errors import ConfigError

__all__ = ["Endpoint", "Gate", "Keys", "host_of", "is_loopback", "parse_endpoint"]


class Keys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CURVE keys of one link, as 40-character Z85 text.

    Attributes:
        secret: This link's secret key. Its public key is derived from it.
        allow: Public keys of the links that may speak to this one.
    """

    secret: str
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what, key in (("secret", self.secret), *(("allow", each) for each in self.allow)):
            _check_key(f"keys.{what}", key)

    @property
    def public(self) -> str:
        """The public key that belongs to the secret one."""
        return bytes(zmq.curve_public(self.secret.encode())).decode()

    def __repr__(self) -> str:
        return f"Keys(public={self.public!r}, secret=..., {len(self.allow)} allowed)"


class Endpoint(NamedTuple):
    """Where a link listens, and the public key it proves to hold.

    Attributes:
        address: ``tcp://host:port``.
        key: Public key, or empty without security.
    """

    address: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.address}|{self.key}" if self.key else self.address


def parse_endpoint(text: str) -> Endpoint:
    """Read ``tcp://host:port`` or ``tcp://host:port|public-key``.

    Raises:
        ConfigError: It is neither.
    """
    address, _, key = text.partition("|")
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{text!r} is not an address", hint="tcp://host:port, or tcp://host:port|public-key")
    if key:
        _check_key(f"the key in address {address!r}", key)
    return Endpoint(address, key)


def _check_key(what: str, key: str) -> None:
    try:
        valid = len(key) == 40 and len(zmq.utils.z85.decode(key.encode("ascii"))) == 32
    except (ValueError, KeyError, struct.error):
        valid = False
    if not valid:
        raise ConfigError(f"{what} is not a CURVE key", cause="40 characters of Z85 are expected", code="config.keys")


def host_of(address: str) -> str:
    """The host in ``tcp://host:port``, without brackets."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def is_loopback(address: str) -> bool:
    """Whether ``tcp://host:port`` cannot be reached from another machine."""
    host = host_of(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Gate:
    """Answers the socket library's question whether the holder of a key may connect (ZAP, RFC 27).

    Every socket of the context asks it. It belongs to the thread that owns the sockets.
    """

    def __init__(self, context: zmq.Context[Any], allowed: Collection[str]) -> None:
        self._allowed = {key.encode() for key in allowed}
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")
        self.refused = 0

    def answer(self) -> None:
        """Take one question and answer it; anything but an allowed CURVE key is refused."""
        frames = self.socket.recv_multipart()
        version, request = (*frames, b"", b"")[:2]
        ok = (
            version == b"1.0"
            and len(frames) == 7
            and frames[5] == b"CURVE"
            and bytes(zmq.utils.z85.encode(frames[6])) in self._allowed
        )
        self.refused += not ok
        status, text = (b"200", b"OK") if ok else (b"400", b"key not allowed")
        self.socket.send_multipart([version, request, status, text, b"", b""])
