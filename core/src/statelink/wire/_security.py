"""Decides who may connect: addresses with keys, and the check of a peer's key."""

from __future__ import annotations

import errno
import functools
import ipaddress
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq
import zmq.utils.z85

from statelink._logs import logger
from statelink.backend import Tally
from statelink.errors import ConfigError

from ._hosts import WILDCARDS, only_this_host
from ._keys import key_from_url, key_to_url

if TYPE_CHECKING:
    from ._keys import Keys

__all__ = ["Endpoint", "Gate", "check_dial", "check_listen", "host_of", "is_loopback", "parse_endpoint", "unbound"]

log = logger("statelink.wire")

ADDRESS = re.compile(r"tcp://[!-~]+:([0-9]{1,5})")
NOT_IN_A_HOST = frozenset(";/?#")
"""ZeroMQ takes what follows a semicolon for the address, and what stands before it for the one to dial from."""


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
    read = ADDRESS.fullmatch(address)
    if read is None or int(read[1]) > 65535 or not NOT_IN_A_HOST.isdisjoint(address.removeprefix("tcp://")):
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


def check_listen(listen: str, *, advertise: str, keys: Keys | None, insecure: bool) -> Endpoint:
    """Check where a link would listen. Opens nothing.

    Args:
        listen: The address.
        advertise: Host under which peers reach it; the listening host when empty.
        keys: The link's keys.
        insecure: Whether to listen beyond loopback without keys.

    Raises:
        ConfigError: It is no address, would be open to all without keys, or is no address that a peer can dial.
    """
    endpoint = parse_endpoint(listen)
    if keys is None and not insecure and not only_this_host(host_of(endpoint.address)):
        raise ConfigError(
            f"this link would listen on {endpoint.address} without keys",
            cause="anyone who reaches that address could read and change requests",
            hint="configure keys, or set insecure = true on a network that you trust wholly",
            code="config.insecure",
        )
    if host_of(endpoint.address) in WILDCARDS and not advertise:
        raise ConfigError(
            f"this link would listen on {endpoint.address}, which is no address that a peer can dial",
            hint="set 'advertise' to the host under which peers reach this process",
            code="config.advertise",
        )
    return endpoint


def check_dial(endpoint: Endpoint, keys: Keys | None) -> None:
    """Check that a link with these keys may dial an address. Opens nothing.

    Raises:
        ConfigError: Only one side has keys, or the address's key is not allowed.
    """
    if bool(endpoint.key) != bool(keys):
        raise ConfigError(
            f"cannot dial {endpoint.address}",
            cause="its address has a key and this link has none"
            if endpoint.key
            else "this link has keys and its address has none",
            hint="write the address as tcp://host:port@public-key, and configure keys on both sides",
            code="config.keys",
        )
    if keys is not None and endpoint.key not in keys.allow:
        # The peer proves that it holds the key in its address. But whoever gave us the address must not decide that
        # the peer may learn where our memory is. So the key has to be allowed, too.
        raise ConfigError(
            f"cannot dial {endpoint.address}",
            cause=f"its public key, {endpoint.key}, is not in this link's allow-list",
            hint="add it to 'allow' of 'keys', or to the allow file",
            code="config.keys",
        )


def unbound(address: str, error: zmq.ZMQError) -> ConfigError:
    """The error that says why nobody can listen on ``tcp://host:port``."""
    host, port = host_of(address), address.rpartition(":")[2]
    hints = {
        errno.EADDRINUSE: f"`ss -ltnp 'sport = :{port}'` shows who listens there; port 0 picks a free port",
        errno.EADDRNOTAVAIL: f"{host} is no address of this host: `ip address` shows those that are; where peers reach "
        "it under another host, listen on 0.0.0.0 and set 'advertise'",
        errno.ENODEV: f"{host} is neither an address nor a network interface of this host: see `ip address`",
        errno.EACCES: "ports below 1024 need a privilege: take a higher one, or port 0",
    }
    return ConfigError(
        f"cannot listen on {address}",
        cause=str(error),
        hint=hints.get(error.errno or 0, "name an address of this host; port 0 picks a free port"),
        code="config.listen",
    )


class Gate:
    """Tells the socket library whether the holder of a key may connect (ZAP, RFC 27).

    Every socket of the context asks it. It belongs to the thread that owns the sockets.
    """

    def __init__(self, context: zmq.Context[Any], allowed: Collection[str]) -> None:
        self._allowed = {key.encode() for key in allowed}
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")
        self._refused = Tally()

    @property
    def refused(self) -> int:
        """How many connections it has refused. Any thread."""
        return self._refused.total()

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
            if self._refused.note("key"):
                log.warning("refused a key that is not allowed (%d times): %s", self.refused, key.decode())
        self.socket.send_multipart([version, request, status, text, user, b""])
