"""The options of the backend."""

from __future__ import annotations

import ipaddress

import msgspec

from statelink.backend import Ports
from statelink.errors import ConfigError

__all__ = ["Options"]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the ``tcp`` backend. Times are in seconds, sizes in bytes.

    Attributes:
        host: IP address at which to listen; if empty, where the link listens. Peers always get the link's own host, so
            ``0.0.0.0`` can be used to listen on all interfaces.
        port: Data port to listen at, or a range such as ``7200-7299``, of which the first free port is taken; 0 lets
            the system choose. It may be the range of ``listen``: the link and the backend then take a port each.
        same_host_copy: Whether the receiver may read batches directly from the sender's memory, if both are on one
            machine. Both ends have to allow it, and so does the kernel. Otherwise batches go through the socket.
        permit_ptrace: Whether to ask the kernel to let *any* process of this user read (and trace) this one. If Yama
            restricts tracing (``kernel.yama.ptrace_scope`` is 1, the default of several distributions), a sender has
            to do this for ``same_host_copy``. It weakens a protection of the whole process, so it is off by default.
        connect_timeout: How long a sender tries to reach and authenticate to a peer before its transfers
            fail.
        stall_timeout: If a peer makes no progress for this long, transfers to it fail. With 0 they wait until the peer
            is disconnected.
        congestion: The kernel's algorithm of congestion control for the data connections, such as ``bbr``; if empty,
            the kernel's default. It is the sender's that counts. One that the kernel does not allow is refused.
        streams: Most connections to a peer, and from it; the smaller number of both sides counts. The first one carries
            small batches, which then do not wait for large ones. Between two hosts, the others share the large ones:
            all of them if a round trip takes 5 ms or more, or else three. On one host, there is one for large ones.
            With 1, a connection carries everything.
    """

    host: str = ""
    port: int | str = 0
    same_host_copy: bool = True
    permit_ptrace: bool = False
    connect_timeout: float = 10.0
    stall_timeout: float = 30.0
    congestion: str = ""
    streams: int = 8

    def __post_init__(self) -> None:
        if self.host:
            try:
                ipaddress.ip_address(self.host)
            except ValueError as error:
                raise _wrong("host", self.host, "it is no IP literal") from error
        try:
            Ports.read(self.port)
        except ValueError as error:
            raise _wrong("port", self.port, str(error)) from error
        if not self.congestion.isascii():
            raise _wrong("congestion", self.congestion, "the kernel's names have ASCII letters alone")
        if not 0 < self.connect_timeout < 1e6:
            raise _wrong("connect_timeout", self.connect_timeout, "it has to be a positive number of seconds")
        if not 0 <= self.stall_timeout < 1e6:
            raise _wrong("stall_timeout", self.stall_timeout, "it has to be 0 or a positive number of seconds")
        if not 1 <= self.streams <= 64:
            raise _wrong("streams", self.streams, "it is between 1 and 64")

    @property
    def ports(self) -> Ports:
        """The data port, or the range from which it is taken."""
        return Ports.read(self.port)


def _wrong(name: str, value: object, cause: str) -> ConfigError:
    return ConfigError(f"option {name!r} of backend 'tcp' cannot be {value!r}", cause=cause)
