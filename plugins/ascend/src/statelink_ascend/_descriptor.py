"""What a peer is told; no library."""

from __future__ import annotations

import ipaddress

import msgspec

from statelink.errors import TransferError

__all__ = ["Descriptor", "refused", "session_of"]

FORMAT = 1


class Descriptor(msgspec.Struct, frozen=True, array_like=True):
    """What a peer gets.

    Attributes:
        format: Version of this structure; it stays the first field for ever.
        link: Name of the link.
        role: ``Prefill`` or ``Decode``.
        kind: Name of what moves the bytes there.
        host: Address of the engine, an IP literal.
        port: Where it answers.
    """

    format: int
    link: str
    role: str
    kind: str
    host: str
    port: int

    @classmethod
    def decode(cls, raw: bytes, peer: str, role: str, kind: str) -> Descriptor:
        """From bytes that came from ``peer``, which has to be of the other role and of the same kind.

        Raises:
            TransferError: They are not such a descriptor.
        """
        cause = ""
        try:
            found = msgspec.msgpack.decode(raw, type=cls)
            ipaddress.ip_address(found.host)
        except ValueError as error:  # msgspec's are, too
            raise refused(peer, f"its descriptor does not decode: {error}") from error
        if found.format != FORMAT:
            cause = f"its descriptor has format {found.format}, this plugin speaks {FORMAT}"
        elif found.link != peer:
            cause = f"its descriptor is that of a link called {found.link!r}"
        elif not 0 < found.port < 1 << 16:
            cause = f"its descriptor has the port {found.port}"
        elif {found.role, role} != {"Prefill", "Decode"}:
            cause = f"its role is {found.role}, ours is {role}, and MemFabric connects a Prefill to a Decode"
        elif found.kind != kind:
            cause = f"it moves bytes by {found.kind}, we by {kind}"
        if cause:
            raise refused(peer, cause)
        return found


def session_of(host: str, port: int) -> str:
    """An engine's address, in the library's form."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def refused(peer: str, cause: str, hint: str = "") -> TransferError:
    """The error of a peer that cannot be connected."""
    what = "a peer cannot be connected over MemFabric"
    return TransferError(what, cause=cause, hint=hint, backend="ascend", peer=peer)
