"""Descriptors with which a plugin tells peers how to reach its engine. They are strict on input."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, ClassVar, TypeVar

import msgspec

from ._errors import unreachable

if TYPE_CHECKING:
    from statelink.errors import TransferError

__all__ = ["Descriptor", "Located", "session"]

D = TypeVar("D", bound="Descriptor")


class _Head(msgspec.Struct, array_like=True):
    format: int


class Descriptor(msgspec.Struct, frozen=True, array_like=True):
    """Base of a plugin's descriptor. The plugin adds its fields after these two, and further checks in `check`.

    Attributes:
        format: Version of the structure. It always stays the first field.
        link: Name of the link.
    """

    FORMAT: ClassVar[int] = 1
    """The version of the structure that this plugin reads and writes."""
    BACKEND: ClassVar[str]
    """Name of the plugin's backend, for errors."""
    LIBRARY: ClassVar[str]
    """The library that moves the bytes, for errors."""

    format: int
    link: str

    def encode(self) -> bytes:
        """Encode it, for `Backend.descriptor`."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls: type[D], raw: bytes, peer: str) -> D:
        """Decode bytes that came from ``peer``.

        Raises:
            TransferError: The bytes are no such descriptor, or one of another version or link, or `check` failed.
        """
        try:
            head = msgspec.msgpack.decode(raw, type=_Head)
            found = msgspec.msgpack.decode(raw, type=cls) if head.format == cls.FORMAT else None
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # also for deep nesting
            raise cls.refused(peer, f"its descriptor does not decode: {error}") from error
        if found is None:
            raise cls.refused(peer, f"its descriptor has format {head.format}, this plugin speaks {cls.FORMAT}")
        if found.link != peer:
            raise cls.refused(peer, f"its descriptor is that of a link called {found.link!r}")
        try:
            found.check()
        except ValueError as error:
            raise cls.refused(peer, f"its descriptor {error}") from error
        return found

    def check(self) -> None:
        """Check that the fields can be true.

        Raises:
            ValueError: They cannot. Its text follows the words "its descriptor".
        """

    @classmethod
    def refused(cls, peer: str, cause: str, hint: str = "") -> TransferError:
        """The error of a peer that cannot be connected."""
        return unreachable(cls.LIBRARY, peer, cause, backend=cls.BACKEND, hint=hint)


class Located(Descriptor, frozen=True, array_like=True):
    """Base of the descriptor of an engine that listens at an address.

    Attributes:
        host: An IP literal.
        port: Where it listens.
    """

    host: str
    port: int

    @property
    def session(self) -> str:
        """The engine's address in the form that libraries take."""
        return session(self.host, self.port)

    def check(self) -> None:
        """See `Descriptor.check`."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError as error:
            raise ValueError(f"has a host that is no address: {error}") from error
        if not 0 < self.port < 1 << 16:
            raise ValueError(f"has the port {self.port}")


def session(host: str, port: int) -> str:
    """``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
