"""Decides who may connect: addresses with keys, and the check of a peer's key."""

from __future__ import annotations

import functools
import ipaddress
import logging
from collections.abc import Collection
from typing import Any, NamedTuple

import zmq
import zmq.utils.z85

from statelink.errors import ConfigError

from ._keys import key_from_url, key_to_url

__all__ = ["Endpoint", "Gate", "host_of", "is_loopback", "parse_endpoint"]

log = logging.getLogger("statelink.wire")


class Endpoint(NamedTuple):
    """The address at which a link listens, and the public key that it proves to hold.

    As text, the key is written in base64url, which no shell and no URL has to quote.

    Attributes:
        address: ``tcp://host:port``.
        key: Public key, 40 characters of Z85, or empty without security.
    """

    address: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.address}@{key_to_url(self.key)}" if self.key else self.address


@functools.lru_cache(maxsize=4096)
def parse_endpoint(text: str) -> Endpoint:
    """Read ``tcp://host:port`` or ``tcp://host:port@public-key``, with a key of 43 characters of base64url.

    Raises:
        ConfigError: The text is neither.
    """
    address, found, written = text.partition("@")
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{text!r} is not an address", hint="tcp://host:port, or tcp://host:port@public-key")
    return Endpoint(address, key_from_url(f"the key in address {address!r}", written) if found else "")


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
    """Tells the socket library whether the holder of a key may connect (ZAP, RFC 27).

    Every socket of the context asks it. It belongs to the thread that owns the sockets.
    """

    def __init__(self, context: zmq.Context[Any], allowed: Collection[str]) -> None:
        self._allowed = {key.encode() for key in allowed}
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")
        self.refused = 0

    def answer(self) -> None:
        """Answer one question. Everything but an allowed CURVE key is refused.

        Messages over an accepted connection carry its key as ``User-Id``.
        """
        frames = self.socket.recv_multipart()
        version, request = (*frames, b"", b"")[:2]
        key = b""
        if version == b"1.0" and len(frames) == 7 and frames[5] == b"CURVE" and len(frames[6]) == 32:
            key = bytes(zmq.utils.z85.encode(frames[6]))
        if key in self._allowed:
            status, text, user = b"200", b"OK", key
        else:
            status, text, user = b"400", b"key not allowed", b""
            self.refused += 1
            if self.refused & (self.refused - 1) == 0:  # 1, 2, 4, 8, ...: a flood does not fill the log
                log.warning("refused a key that is not allowed (%d times): %s", self.refused, key.decode())
        self.socket.send_multipart([version, request, status, text, user, b""])
