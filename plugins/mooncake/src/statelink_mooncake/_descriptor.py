"""What a peer is told; no library."""

from __future__ import annotations

import ipaddress

import msgspec

from statelink.errors import TransferError

__all__ = ["Descriptor", "session"]

FORMAT = 1


class Descriptor(msgspec.Struct, frozen=True, array_like=True):
    """What a peer gets.

    Attributes:
        format: Version of this structure; it stays the first field for ever.
        link: Name of the link.
        library: Build and version of Mooncake there; only for error messages.
        host: Address of the engine, an IP literal.
        port: Where it answers.
    """

    format: int
    link: str
    library: str
    host: str
    port: int

    @classmethod
    def of(cls, link: str, library: str, host: str, port: int) -> Descriptor:
        """The descriptor of an engine here."""
        return cls(FORMAT, link, library, host, port)

    def encode(self) -> bytes:
        """As bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, raw: bytes, peer: str) -> Descriptor:
        """From bytes that came from ``peer``.

        Raises:
            TransferError: They are not such a descriptor, or that of another link.
        """
        try:
            found = msgspec.msgpack.decode(raw, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _refused(peer, f"its descriptor does not decode: {error}") from error
        if found.format != FORMAT:
            raise _refused(peer, f"its descriptor has format {found.format}, this plugin speaks {FORMAT}")
        if found.link != peer:
            raise _refused(peer, f"its descriptor is that of a link called {found.link!r}")
        try:
            ipaddress.ip_address(found.host)
        except ValueError as error:
            raise _refused(peer, f"its descriptor has a host that is no address: {error}") from error
        if not 0 < found.port < 1 << 16:
            raise _refused(peer, f"its descriptor has the port {found.port}")
        return found


def session(host: str, port: int) -> str:
    """An engine's address, in the library's form."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _refused(peer: str, cause: str) -> TransferError:
    return TransferError("a peer cannot be connected over Mooncake", cause=cause, backend="mooncake", peer=peer)
