"""What a peer needs to reach us, and whether it can."""

from __future__ import annotations

import msgspec

from statelink.backend import boot_id
from statelink.errors import TransferError

__all__ = ["FORMAT", "Descriptor", "refused"]

FORMAT = 1


class Descriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="backend", tag="shm"):
    """How to reach one backend object.

    Attributes:
        format: Version of this structure.
        link: Name of its link.
        boot: Which run of which machine it lives on.
        socket: Where it listens: a name in the abstract namespace of UNIX sockets.
        secret: What a peer shows there, to prove that it has this from its owner.
    """

    format: int
    link: str
    boot: str
    socket: str
    secret: str

    def encode(self) -> bytes:
        """As bytes."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, raw: bytes, peer: str) -> Descriptor:
        """The descriptor that ``peer`` sent.

        Raises:
            TransferError: It is none of ours, somebody else's, or from another machine.
        """
        try:
            found = msgspec.json.decode(raw, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # also for deep nesting
            raise refused(peer, f"its descriptor does not decode: {error}") from error
        if found.format != FORMAT:
            raise refused(peer, f"its descriptor has format {found.format}, this package speaks {FORMAT}")
        if found.link != peer:
            raise refused(peer, f"its descriptor is that of {found.link!r}")
        if found.boot != boot_id():
            raise refused(peer, "it is on another host", "shared memory ends at the host; backend 'tcp' does not")
        return found


def refused(peer: str, cause: str, hint: str = "") -> TransferError:
    """Why a peer cannot be connected."""
    return TransferError("a peer cannot be connected", cause=cause, hint=hint, backend="shm", peer=peer)
