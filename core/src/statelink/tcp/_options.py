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
        handshake_timeout: How long an incoming connection may take to authenticate before it is dropped.
        stall_timeout: If a peer makes no progress for this long, transfers to it fail. With 0 they wait until the peer
            is disconnected.
        drain_timeout: How long to wait, when a connection is given up, until the receiver confirms that it has
            stopped. Transfers without a confirmation fail and are *not* settled.
        max_pending: Most incoming connections that have not authenticated. If there are more, the oldest is dropped.
        send_buffer: Size of the kernel's send buffer; 0 lets the kernel tune it.
        receive_buffer: Size of the kernel's receive buffer; 0 lets the kernel tune it.
        congestion: The kernel's algorithm of congestion control for the data connections, such as ``bbr``; if empty,
            the kernel's default. It is the sender's that counts. One that the kernel does not allow is refused.
        piece_bytes: Most bytes that are moved between two checks of the grant. Smaller pieces make a revoke faster.
            Larger pieces cost less: after each, a thread waits for the interpreter.
        streams: Most connections to a peer, and from it; the smaller number of both sides counts. The first one carries
            small batches, which then do not wait for large ones. Between two hosts, the others share the large ones:
            all of them if a round trip takes 5 ms or more, or else three. On one host, there is one for large ones.
            With 1, a connection carries everything.
        copy_threads: How many threads copy a batch of ``same_host_copy`` of 4 MiB or more, or of two pieces. With 1,
            it is the receiving thread alone.
    """

    host: str = ""
    port: int | str = 0
    same_host_copy: bool = True
    permit_ptrace: bool = False
    connect_timeout: float = 10.0
    handshake_timeout: float = 5.0
    stall_timeout: float = 30.0
    drain_timeout: float = 1.0
    max_pending: int = 32
    send_buffer: int = 0
    receive_buffer: int = 0
    congestion: str = ""
    piece_bytes: int = 8 << 20
    streams: int = 8
    copy_threads: int = 2

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
        for name in ("connect_timeout", "handshake_timeout"):
            if not 0 < getattr(self, name) < 1e6:
                raise _wrong(name, getattr(self, name), "it has to be a positive number of seconds")
        for name in ("stall_timeout", "drain_timeout"):
            if not 0 <= getattr(self, name) < 1e6:
                raise _wrong(name, getattr(self, name), "it has to be 0 or a positive number of seconds")
        for name, least in (
            ("max_pending", 1),
            ("send_buffer", 0),
            ("receive_buffer", 0),
            ("piece_bytes", 4096),
        ):
            if not least <= getattr(self, name) < 1 << 31:
                raise _wrong(name, getattr(self, name), f"it is between {least} and {(1 << 31) - 1}")
        for name in ("copy_threads", "streams"):
            if not 1 <= getattr(self, name) <= 64:
                raise _wrong(name, getattr(self, name), "it is between 1 and 64")

    @property
    def ports(self) -> Ports:
        """The data port, or the range from which it is taken."""
        return Ports.read(self.port)


def _wrong(name: str, value: object, cause: str) -> ConfigError:
    return ConfigError(f"option {name!r} of backend 'tcp' cannot be {value!r}", cause=cause)
