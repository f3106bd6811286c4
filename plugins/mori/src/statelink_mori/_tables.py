"""What a peer is told, and the checks that the library does not make or survive."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from statelink.backend import Blocks, Op, Region, RegionTable, pack_descriptors, unpack_descriptors
from statelink.errors import TransferError, WireError

if TYPE_CHECKING:
    from ._library import Engine, Library

__all__ = ["Offer", "Part", "Table", "covering", "describe"]

U64 = npt.NDArray[np.uint64]

FORMAT = b"statelink-mori/1"


class Offer(NamedTuple):
    """What a peer gets: the library's packed descriptors, in the field's nested list.

    Attributes:
        engine: The peer's engine.
        memories: Its memories, in the order of its region table.
        library: Its version of the library; only for error messages.
    """

    engine: Any
    memories: list[Any]
    library: str

    @classmethod
    def encode(cls, link: str, engine: Engine, library: Library) -> bytes:
        """What an engine here offers."""
        head: list[bytes | None] = [FORMAT, link.encode(), library.version.encode()]
        return pack_descriptors([head, [engine.desc.pack()], [memory.pack() for memory in engine.memories]])

    @classmethod
    def decode(cls, raw: bytes, peer: str, regions: Sequence[Region], library: Library) -> Offer:
        """From bytes that came from ``peer``.

        Raises:
            TransferError: They are not such a descriptor, that of another link, or not that of ``regions``.
        """
        io = library.io
        try:
            (form, link, version), (packed,), memories = unpack_descriptors(raw, nested=True)
            if (form, link) != (FORMAT, peer.encode()):
                raise ValueError(f"it is one of format {form!r} and of a link called {link!r}")
            engine = io.EngineDesc.unpack(packed)
            ipaddress.IPv4Address(engine.host)  # the library connects to something else instead of refusing
            found = [io.MemoryDesc.unpack(each) for each in memories]
            wanted = [(engine.key, each.address, each.nbytes, *library.place(each)) for each in regions]
            if [(each.engine_key, each.data, each.size, each.loc, each.device_id) for each in found] != wanted:
                raise ValueError(f"its {len(found)} memories are not the {len(wanted)} regions")
        except (WireError, ValueError, TypeError, RuntimeError) as error:
            cause = f"its descriptor is refused: {error}"
            what = "a peer cannot be connected over MoRI"
            raise TransferError(what, cause=cause, backend="mori", peer=peer) from error
        return cls(engine, found, (version or b"").decode(errors="replace"))


class Table(RegionTable):
    """A region table, for a library that takes offsets."""

    __slots__ = ()

    def __init__(self, regions: Sequence[Region]) -> None:
        super().__init__(regions, "mori")

    def offsets(self, side: str, addresses: U64, nbytes: U64, regions: npt.NDArray[np.uint32]) -> U64:
        """Where blocks begin in their regions.

        Raises:
            TransferError: One is not inside.
        """
        self.check(side, addresses, nbytes, regions)
        found: U64 = addresses - self.starts[regions]
        return found


class Part(NamedTuple):
    """What one session moves: a pair of regions; and offsets here, offsets there, and lengths."""

    near: int
    far: int
    blocks: tuple[list[int], list[int], list[int]]


def describe(blocks: Blocks, op: Op, local: Table, remote: Table) -> Iterator[Part]:
    """One batch for each pair of regions. Everything is checked before the first is handed out.

    Raises:
        TransferError: The batch is empty, its columns differ in length, or a block is not inside its regions.
    """
    source, target = (blocks.source, blocks.source_region), (blocks.target, blocks.target_region)
    (here, near), (there, far) = (source, target) if op is Op.WRITE else (target, source)
    nbytes = blocks.nbytes
    counts = {len(column) for column in (here, near, there, far, nbytes)}
    if len(counts) != 1 or counts == {0}:
        cause = f"columns of {sorted(counts)} blocks"
        raise TransferError("a batch is empty, or its columns differ in length", cause=cause, backend="mori")
    here = local.offsets("here", here, nbytes, near)
    there = remote.offsets("by the peer", there, nbytes, far)
    pair = near.astype(np.uint64) << np.uint64(32) | far
    order = np.argsort(pair, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(pair[order])) + 1)
    return (
        Part(int(near[rows[0]]), int(far[rows[0]]), (here[rows].tolist(), there[rows].tolist(), nbytes[rows].tolist()))
        for rows in groups
    )


def covering(local: Sequence[Region], remote: Sequence[Region]) -> set[tuple[int, int]]:
    """Pairs of regions in which each region of either side occurs, with each kind of memory of the other side.

    That is as many as make the library do, for any other pair, nothing over the network any more: it keeps what it
    registered, each remote key, and each connection between two devices. All pairs of 200 layers would be 40,000.
    """
    kinds = [
        [[index for index, each in enumerate(regions) if each.kind == kind] for kind in {each.kind for each in regions}]
        for regions in (local, remote)
    ]
    return {
        (near[number % len(near)], far[number % len(far)])
        for near in kinds[0]
        for far in kinds[1]
        for number in range(max(len(near), len(far)))
    }
