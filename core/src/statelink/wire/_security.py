"""Decides who may connect: addresses with keys, and the check of a peer's key."""

from __future__ import annotations

import errno
import functools
import ipaddress
import re
import secrets
from collections.abc import Collection
from typing import Any, NamedTuple

import zmq
import zmq.utils.z85

from statelink._logs import logger
from statelink.backend import Ports, Tally
from statelink.errors import ConfigError

from ._hosts import WILDCARDS, only_this_host
from ._keys import Keys, key_from_url, key_to_url

__all__ = [
    "Endpoint",
    "Gate",
    "ListenAddress",
    "check_dial",
    "check_keys",
    "check_listen",
    "host_of",
    "is_loopback",
    "key_of",
    "link_name",
    "may_say",
    "parse_endpoint",
    "parse_listen",
    "unbound",
]

log = logger("statelink.wire")

ADDRESS = re.compile(r"tcp://[!-~]+:([0-9]{1,5})")
LISTEN = re.compile(r"tcp://([!-~]+):([0-9-]+)")
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


class ListenAddress(NamedTuple):
    """Where a link is to listen, as it is configured.

    Attributes:
        host: Host name, IP address or network interface, without brackets.
        ports: The port, or the range from which the first free one is taken.
    """

    host: str
    ports: Ports

    def at(self, port: int | Ports) -> str:
        """``tcp://host:port`` for one of the ports."""
        return f"tcp://[{self.host}]:{port}" if ":" in self.host else f"tcp://{self.host}:{port}"

    def __str__(self) -> str:
        return self.at(self.ports)


@functools.lru_cache(maxsize=4096)
def parse_endpoint(text: str) -> Endpoint:
    """Read ``tcp://host:port`` or ``tcp://host:port@public-key``, with a key of 43 characters of base64url.

    Raises:
        ConfigError: The text is neither.
    """
    address = text.partition("@")[0]
    read = ADDRESS.fullmatch(address)
    if read is None or int(read[1]) > 65535 or not NOT_IN_A_HOST.isdisjoint(address.removeprefix("tcp://")):
        raise ConfigError(f"{text!r} is not an address", hint="tcp://host:port, or tcp://host:port@public-key")
    return Endpoint(address, Keys.in_address(text))


def parse_listen(text: str) -> ListenAddress:
    """Read where to listen: ``tcp://host:port``, or a range of ports, ``tcp://host:7100-7199``.

    Raises:
        ConfigError: The text is neither.
    """
    read = LISTEN.fullmatch(text)
    cause = ""
    if read is not None and (NOT_IN_A_HOST | {"@"}).isdisjoint(read[1]):
        try:
            return ListenAddress(read[1].strip("[]"), Ports.read(read[2]))
        except ValueError as error:
            cause = str(error)
    raise ConfigError(
        f"{text!r:.80} is no address at which to listen",
        cause=cause,
        hint="tcp://host:port, or a range of ports: tcp://host:7100-7199",
        code="config.listen",
    )


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


def link_name(label: str, keys: Keys | None) -> str:
    """A name for a link that no other link ever has: ``label-incarnation``, or with keys ``label@key-incarnation``.

    The key is the link's public one, written as in an address. So a connection, which proves a key, also proves which
    names its messages may have; see `may_say`. The incarnation is 64 random bits.

    Args:
        label: What the name begins with. It has at most 170 bytes, because a routing id of ZeroMQ, which has the name
            and more, has at most 255.
        keys: The link's keys.
    """
    return f"{label}{f'@{key_to_url(keys.public)}' if keys else ''}-{secrets.token_hex(8)}"


def may_say(name: str, key: str) -> bool:
    """Whether the holder of a public key may be the link of this name."""
    return name.rpartition("-")[0].endswith(f"@{key_to_url(key)}")


def key_of(name: str) -> str:
    """The public key in the name of a link that has keys.

    Raises:
        ConfigError: The name has none.
    """
    return key_from_url("the end of a link's name", name.rpartition("-")[0].rpartition("@")[2])


def check_keys(keys: Keys | None) -> Keys | None:
    """Check that the keys of a link allow somebody.

    Returns:
        The keys.

    Raises:
        ConfigError: They allow nobody. A list is read when a link is opened, so nobody would ever come.
    """
    if keys is not None and not keys.allow:
        raise ConfigError(
            "this link has keys and allows nobody",
            cause="no peer could connect to it, and it could connect to none",
            hint="put the public keys of its peers into 'allow' or 'allow_file' of 'keys', or STATELINK_ALLOW_FILE",
            code="config.keys",
        )
    return keys


def check_listen(listen: str, *, advertise: str, keys: Keys | None, insecure: bool) -> ListenAddress:
    """Check where a link would listen. Opens nothing.

    Args:
        listen: The address.
        advertise: Host under which peers reach it; the listening host when empty.
        keys: The link's keys.
        insecure: Whether to listen beyond loopback without keys.

    Raises:
        ConfigError: It is no address, would be open to all without keys or to nobody with them, or is no address that a
            peer can dial.
    """
    where = parse_listen(listen)
    check_keys(keys)
    if keys is None and not insecure and not only_this_host(where.host):
        raise ConfigError(
            f"this link would listen on {where} without keys",
            cause="anyone who reaches that address could read and change requests",
            hint="configure keys, or set insecure = true on a network that you trust wholly",
            code="config.insecure",
        )
    if where.host in WILDCARDS and not advertise:
        raise ConfigError(
            f"this link would listen on {where}, which is no address that a peer can dial",
            hint="set 'advertise' to the host under which peers reach this process",
            code="config.advertise",
        )
    return where


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


def unbound(where: ListenAddress, error: zmq.ZMQError) -> ConfigError:
    """The error that says why nobody can listen there."""
    host, ports = where
    in_use = f"`ss -ltnp 'sport = :{ports}'` shows who listens there; port 0 picks a free port"
    if ports.several:
        in_use = (
            "each rank of this host takes a port of the range: give it more of them; "
            f"`ss -ltnp 'sport >= :{ports.first} and sport <= :{ports.last}'` shows who listens there"
        )
    hints = {
        errno.EADDRINUSE: in_use,
        errno.EADDRNOTAVAIL: f"{host} is no address of this host: `ip address` shows those that are; where peers reach "
        "it under another host, listen on 0.0.0.0 and set 'advertise'",
        errno.ENODEV: f"{host} is neither an address nor a network interface of this host: see `ip address`",
        errno.EACCES: "ports below 1024 need a privilege: take a higher one, or port 0",
    }
    return ConfigError(
        f"cannot listen on {where}",
        cause=ports.why(error),
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
