"""What a peer is told, and batches as sessions take them."""

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
    """What a peer gets: the library's packed descriptors, in the field's nested list.

    Attributes:
        engine: The peer's engine.
        memories: Its memories, in the order of its region table.
        library: Its version of the library; only for error messages.
        backends: The library's backends that it created.
    """

    engine: Any
    memories: list[Any]
    library: str
    backends: frozenset[str]

    @classmethod
    def encode(cls, link: str, engine: Engine, library: Library, options: Options) -> bytes:
        """What an engine here offers."""
        words = (link, library.version, " ".join(options.backends), str(engine.data_conns))
        head = [FORMAT, *(each.encode() for each in words)]
        return pack_descriptors([head, [engine.desc.pack()], [memory.pack() for memory in engine.memories]])

    @classmethod
    def decode(
        cls, raw: bytes, peer: str, regions: Sequence[Region], ours: Engine, library: Library, options: Options
    ) -> Offer:
        """From bytes that came from ``peer``.

        Raises:
            TransferError: They are not such a descriptor, that of another link, not that of ``regions``, or that of an
                engine which no transport of ours reaches.
        """
        io = library.io
        try:
            (form, link, version, backends, conns), (packed,), memories = unpack_descriptors(raw, nested=True)
            if (form, link) != (FORMAT, peer.encode()):
                raise ValueError(f"it is one of format {form!r} and of a link called {link!r}")
            engine = io.EngineDesc.unpack(packed)
            # The library connects to something else instead of refusing.
            if ipaddress.IPv4Address(engine.host).is_unspecified:
                raise ValueError(f"{engine.host} is nobody's address")
            found = [io.MemoryDesc.unpack(each) for each in memories]
            wanted = [(engine.key, each.address, each.nbytes, *library.place(each)) for each in regions]
            if [(each.engine_key, each.data, each.size, each.loc, each.device_id) for each in found] != wanted:
                raise ValueError(f"its {len(found)} memories are not the {len(wanted)} regions")
            theirs = frozenset((backends or b"").decode().split())
            if not theirs & options.backends.keys():  # over TCP, one would learn of it by a timeout
                raise ValueError(f"it has {' and '.join(sorted(theirs))}, we have {' and '.join(options.backends)}")
            if "TCP" in theirs & options.backends.keys() and conns != str(ours.data_conns).encode():
                raise ValueError(f"its num_data_conns is {conns!r}, ours is {ours.data_conns}: TCP needs equal ones")
        except (WireError, ValueError, TypeError, RuntimeError) as error:
            raise unreachable("MoRI", peer, f"its descriptor is refused: {error}", backend="mori") from error
        return cls(engine, found, (version or b"").decode(errors="replace"), theirs)

    def transport(self, options: Options, ours: Any, regions: Sequence[Region]) -> str:
        """The one transport that is left to the peer, or `UNKNOWN`.

        XGMI serves a pair of memories if both are a GPU's, in one node, and the two can reach each other; the library
        takes the network for all others, and nothing says which pairs it can serve.

        Args:
            options: Ours.
            ours: The library's descriptor of our engine.
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
    """What one session each moves: a pair of regions; and offsets here, offsets there, and lengths."""
    here = ends.here - local.starts[ends.here_region]
    there = ends.there - remote.starts[ends.there_region]
    pair = ends.here_region.astype(np.uint64) << np.uint64(32) | ends.there_region
    order = np.argsort(pair, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(pair[order])) + 1):
        near, far = int(ends.here_region[rows[0]]), int(ends.there_region[rows[0]])
        yield near, far, (here[rows].tolist(), there[rows].tolist(), ends.nbytes[rows].tolist())


def covering(local: Sequence[Any], remote: Sequence[Any]) -> set[tuple[int, int]]:
    """Pairs of memories in which each memory of either side occurs, with each place of memory of the other side.

    That is as many as make the library do, for any other pair, nothing over the network any more: it keeps what it
    registered, each remote key, and each connection between two places. A place is a device or the host, and a NUMA
    node. All pairs of 200 layers would be 40,000.

    Args:
        local: The library's descriptors of our memories.
        remote: Those of the peer's.
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
