"""The descriptor, and batches in the form that sessions take."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from statelink.backend import UNKNOWN, Ends, Region, RegionTable, pack_descriptors, unpack_descriptors
from statelink.backend.native import unreachable
from statelink.errors import WireError

if TYPE_CHECKING:
    from ._library import Engine, Library
    from ._options import Options

__all__ = ["Offer", "covering", "parts_of"]

FORMAT = b"statelink-mori/1"


class Offer(NamedTuple):
    """What a peer needs: the library's packed descriptors, in a nested list.

    Attributes:
        engine: The peer's engine.
        memories: Its memories, in the order of its region table.
        library: Its version of the library, for errors.
        backends: The library's backends that it created.
    """

    engine: Any
    memories: list[Any]
    library: str
    backends: frozenset[str]

    @classmethod
    def encode(cls, link: str, engine: Engine, library: Library, options: Options) -> bytes:
        """Encode the descriptors of a local engine."""
        words = (link, library.version, " ".join(options.backends))
        head = [FORMAT, *(each.encode() for each in words)]
        return pack_descriptors([head, [engine.desc.pack()], [memory.pack() for memory in engine.memories]])

    @classmethod
    def decode(cls, raw: bytes, peer: str, regions: Sequence[Region], library: Library, options: Options) -> Offer:
        """Decode bytes that came from ``peer``.

        Raises:
            TransferError: The bytes are no such descriptor, belong to another link, do not fit ``regions``, or name an
                engine that no transport of this side reaches.
        """
        io = library.io
        try:
            (form, link, version, backends), (packed,), memories = unpack_descriptors(raw, nested=True)
            if (form, link) != (FORMAT, peer.encode()):
                raise ValueError(f"it is one of format {form!r} and of a link called {link!r}")
            engine = io.EngineDesc.unpack(packed)
            # The library would connect to another address instead of refusing.
            if ipaddress.IPv4Address(engine.host).is_unspecified:
                raise ValueError(f"{engine.host} is nobody's address")
            found = [io.MemoryDesc.unpack(each) for each in memories]
            wanted = [(engine.key, each.address, each.nbytes, *library.place(each)) for each in regions]
            if [(each.engine_key, each.data, each.size, each.loc, each.device_id) for each in found] != wanted:
                raise ValueError(f"its {len(found)} memories are not the {len(wanted)} regions")
            theirs = frozenset((backends or b"").decode().split())
            if not theirs & options.backends.keys():  # the library would ask at a port where nobody listens
                raise ValueError(f"it has {' and '.join(sorted(theirs))}, we have {' and '.join(options.backends)}")
        except (WireError, ValueError, TypeError, RuntimeError) as error:
            raise unreachable("MoRI", peer, f"its descriptor is refused: {error}", backend="mori") from error
        return cls(engine, found, (version or b"").decode(errors="replace"), theirs)

    def transport(self, options: Options, ours: Any, regions: Sequence[Region]) -> str:
        """The one transport that is left to the peer, or `UNKNOWN`.

        XGMI serves a pair of memories if both are on GPUs of one node that can reach each other. The library uses the
        network for all others. It does not say which pairs XGMI can serve.

        Args:
            options: This side's options.
            ours: The library's descriptor of this side's engine.
            regions: All memory of both sides.
        """
        left = set(options.transports)
        apart = ours.node_id != self.engine.node_id
        if len(left) > 1 and (apart or all(each.kind == "dram" for each in regions)):
            left.discard("xgmi")
        return left.pop() if len(left) == 1 else UNKNOWN


def parts_of(
    ends: Ends, local: RegionTable, remote: RegionTable
) -> Iterator[tuple[int, int, tuple[list[int], list[int], list[int]]]]:
    """The part of a batch for each session: a pair of regions, with local offsets, remote offsets and lengths."""
    here = ends.here - local.starts[ends.here_region.astype(np.intp)]
    there = ends.there - remote.starts[ends.there_region.astype(np.intp)]
    pair = ends.here_region.astype(np.uint64) << np.uint64(32) | ends.there_region
    order = np.argsort(pair, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(pair[order])) + 1):
        near, far = int(ends.here_region[rows[0]]), int(ends.there_region[rows[0]])
        yield near, far, (here[rows].tolist(), there[rows].tolist(), ends.nbytes[rows].tolist())


def covering(local: Sequence[Any], remote: Sequence[Any]) -> set[tuple[int, int]]:
    """Pairs of memories that contain each memory of either side with each location of the other side.

    A location is a device or the host, with a NUMA node. After the library has set up these pairs, it needs no network
    for any other pair, because it keeps registrations, remote keys, and connections between locations. All pairs of 200
    layers would be 40,000.

    Args:
        local: The library's descriptors of this side's memories.
        remote: The library's descriptors of the peer's memories.
    """
    kinds = []
    for memories in (local, remote):
        places: dict[tuple[Any, int, int], list[int]] = {}
        for index, each in enumerate(memories):
            places.setdefault((each.loc, each.device_id, each.numa_node), []).append(index)
        kinds.append(list(places.values()))
    return {
        (near[number % len(near)], far[number % len(far)])
        for near in kinds[0]
        for far in kinds[1]
        for number in range(max(len(near), len(far)))
    }
