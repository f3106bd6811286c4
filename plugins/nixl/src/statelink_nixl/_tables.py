"""Turns blocks and regions into NIXL's descriptor arrays, and encodes the descriptor. Needs numpy, and no library."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from statelink.backend import Ends, Region, RegionTable, native

__all__ = ["DRAM", "VRAM", "Descriptor", "Part", "Table", "parts_of", "place", "row"]

U64 = npt.NDArray[np.uint64]

DRAM, VRAM = "DRAM", "VRAM"
FEW = 500
"""Most elements of an array that numpy handles without letting go of the interpreter."""
SEGMENTS = {"dram": DRAM, "cuda": VRAM}
NAMES = tuple(SEGMENTS.values())


class Descriptor(native.Descriptor, frozen=True, array_like=True):
    """What a peer needs to reach this agent. The agent has the name of its link.

    Attributes:
        library: Version of NIXL, for errors.
        scratch: Address of a few bytes that peers may overwrite.
        metadata: NIXL's own description of the agent: transports, addresses, registered memory.
        checksum: Checksum of the metadata. Damaged metadata harms NIXL: the part that it loaded before it noticed
            stays, and it can never load the named agent again.
        host: Identifies its host.
        card_scratch: Address of a few bytes on a card that peers may overwrite; 0 if there are none.
        card: The card.
    """

    BACKEND = "nixl"
    LIBRARY = "NIXL"

    library: str
    scratch: int
    metadata: bytes
    checksum: bytes
    host: str = ""
    card_scratch: int = 0
    card: int = 0

    @classmethod
    def of(
        cls, link: str, library: str, scratch: int, metadata: bytes, host: str = "", on_card: tuple[int, int] = (0, 0)
    ) -> Descriptor:
        """The descriptor of an agent here. ``on_card``: the address of its bytes on a card, and the card."""
        return cls(cls.FORMAT, link, library, scratch, metadata, _checksum(metadata), host, *on_card)

    def check(self) -> None:
        """See `statelink.backend.native.Descriptor.check`."""
        if not 0 < self.scratch < 1 << 64:
            raise ValueError(f"has the address {self.scratch}")
        if not (0 <= self.card_scratch < 1 << 64 and 0 <= self.card < 1 << 16):
            raise ValueError(f"has the address {self.card_scratch} on card {self.card}")
        if self.checksum != _checksum(self.metadata):
            raise ValueError("is damaged: the checksum of the metadata differs")


class Table(RegionTable):
    """A region table as columns, in NIXL's terms."""

    __slots__ = ("device", "devices", "kinds", "segment", "segments")

    def __init__(self, regions: Sequence[Region]) -> None:
        super().__init__(regions, "nixl")
        places = [place(region) for region in regions]
        self.devices: U64 = np.array([device for _, device in places], np.uint64)
        devices = set(self.devices.tolist())
        self.device = devices.pop() if len(devices) == 1 else None
        """The device of all regions, if there is only one."""
        self.segments = np.array([NAMES.index(segment) for segment, _ in places], np.uint8)
        distinct = {segment for segment, _ in places}
        self.kinds = frozenset(distinct)
        """The kinds of memory of all regions."""
        self.segment = distinct.pop() if len(distinct) == 1 else None
        """The kind of memory of all regions, if there is only one. Then blocks need no sorting."""


class Part(NamedTuple):
    """One NIXL transfer. Each side has one kind of memory.

    Attributes:
        near_segment: NIXL's name of the kind of memory here.
        near: Address, length and device of each block here; NIXL copies the array in one piece.
        far_segment: The same for the peer.
        far: The same for the peer.
    """

    near_segment: str
    near: U64
    far_segment: str
    far: U64


def place(region: Region) -> tuple[str, int]:
    """NIXL's kind of memory, and the device, of a region.

    Raises:
        TransferError: NIXL has no such kind.
    """
    kind, device = native.torch_place(region, "NIXL", backend="nixl")
    return SEGMENTS[kind], device


def row(address: int, nbytes: int, device: int = 0) -> U64:
    """The array that describes one block."""
    return np.array([[address, nbytes, device]], np.uint64)


def parts_of(ends: Ends, local: Table, remote: Table) -> list[Part]:
    """The fewest transfers that can carry a batch: one, unless the regions have several kinds of memory."""
    near = _rows(ends.here, ends.nbytes, local, ends.here_region)
    far = _rows(ends.there, ends.nbytes, remote, ends.there_region)
    if local.segment is not None and remote.segment is not None:
        return [Part(local.segment, near, remote.segment, far)]
    pair = local.segments[ends.here_region] * len(NAMES) + remote.segments[ends.there_region]
    return [
        Part(NAMES[both // len(NAMES)], near[pair == both], NAMES[both % len(NAMES)], far[pair == both])
        for both in np.unique(pair).tolist()
    ]


def _rows(addresses: U64, nbytes: U64, table: Table, regions: npt.NDArray[np.uint32]) -> U64:
    """Address, length and device of each block.

    They are filled in few at a time. For more, numpy lets go of the interpreter, and an engine that computes keeps it
    for milliseconds.
    """
    rows = np.empty((len(addresses), 3), np.uint64)
    for first in range(0, len(rows), FEW):
        part = slice(first, first + FEW)
        rows[part, 0] = addresses[part]
        rows[part, 1] = nbytes[part]
        rows[part, 2] = table.devices[regions[part].astype(np.intp)] if table.device is None else table.device
    return rows


def _checksum(metadata: bytes) -> bytes:
    return hashlib.blake2b(metadata, digest_size=16).digest()
