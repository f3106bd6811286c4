"""Digests of what was sent and of what arrived, for links with ``verify = "digest"``.

The digest of a component is the sum, modulo 2^128, of the XXH3 hashes of its granules in each buffer, each seeded with
which part of the model's state it is: names, layer, boxes in global coordinates, and positions. So it depends neither
on where pages lie, nor on the order in which they move, nor on how pushes cut them, and both sides compute it from
their own memory and their own description alone. Equal bytes of another head, layer or position have another digest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from statelink.errors import ConfigError, UnsupportedError
from statelink.hints import install_hint
from statelink.plan import StateBytes, arrived_bytes, due

if TYPE_CHECKING:
    from statelink.plan import Items, PairPlan
    from statelink.pointers import Reader
    from statelink.state import Inventory

__all__ = ["check_hash", "check_verify", "differing", "digest_of", "packed"]

MODULUS = 1 << 128

Bytes = npt.NDArray[np.uint8]


def check_hash() -> None:
    """Check that the hash library is installed.

    Raises:
        ConfigError: It is not.
    """
    try:
        import xxhash  # noqa: F401 - an extra; nothing else needs it
    except ImportError as error:
        raise ConfigError(
            "verify = 'digest' needs the package xxhash",
            cause=str(error),
            hint=install_hint("statelink[verify]"),
            code="config.verify",
        ) from error


def check_verify(inventory: Inventory, readable: Collection[str]) -> None:
    """Check that this rank can compute digests.

    Args:
        inventory: What it holds.
        readable: Kinds of memory of devices that can be read from the host.

    Raises:
        ConfigError: The hash library is not installed.
        UnsupportedError: Some registered memory cannot be read from the host.
    """
    check_hash()
    foreign = sorted({region.kind for region in inventory.regions} - {"dram", *readable})
    if foreign:
        raise UnsupportedError(
            f"verify = 'digest' cannot read memory of kind {', '.join(map(repr, foreign))}",
            cause="digests are computed by the processor, and no driver here says how to read that memory",
            hint="leave verify off for this link",
            instance=inventory.instance,
            rank=inventory.rank,
        )
    for component in inventory.components:
        kinds = {inventory.regions[buffer.region].kind for buffer in component.buffers if buffer.count}
        if len(kinds) > 1:
            raise UnsupportedError(
                "verify = 'digest' cannot read a component in several kinds of memory",
                cause=f"{component.name!r} lies in {', '.join(sorted(kinds))}",
                hint="leave verify off for this link, or describe a component for each kind",
                instance=inventory.instance,
                rank=inventory.rank,
            )


def digest_of(parts: Iterable[StateBytes], stop: Stop | None = None, reader: Reader | None = None) -> int:
    """The digest of some content. The digests of a component's pushes add up to that of the component.

    Reads all of the content, in this process's own memory; data threads only.

    Args:
        parts: The content, and where it lies.
        stop: If another thread sets it meanwhile, the rest is left out: the result is not needed any more.
        reader: Reads the content, if it lies on a device.
    """
    from xxhash import xxh3_128_intdigest

    total = 0
    for part in parts:
        if stop is not None and stop.is_set():
            break
        if reader is not None:
            total += _digest_on_device(part, reader)
            continue
        granules, piece = part.granules.tolist(), part.piece
        width = part.offsets.shape[1] * piece
        first, last = int(part.offsets.min()), int(part.offsets.max()) + piece
        starts = (part.offsets[:, 0] - first).tolist()
        for seed, address in zip(part.seeds.tolist(), part.addresses.tolist(), strict=True):
            here = _memory(address + first, last - first)
            if width == piece:
                raw = here.data
                for granule, at in zip(granules, starts, strict=True):
                    total += xxh3_128_intdigest(raw[at : at + width], seed + granule)
            else:
                # Every place at which a piece may begin, as a row: taking rows copies whole pieces.
                rows = np.lib.stride_tricks.as_strided(here, (len(here) - piece + 1, piece), (1, 1), writeable=False)
                raw = rows[part.offsets - first].reshape(-1).data
                for place, granule in enumerate(granules):
                    total += xxh3_128_intdigest(raw[place * width : (place + 1) * width], seed + granule)
    return total % MODULUS


def _digest_on_device(part: StateBytes, reader: Reader) -> int:
    """The digest of content on a device. The same numbers as for host memory."""
    from xxhash import xxh3_128

    total = 0
    width = part.offsets.shape[1] * part.piece
    if not len(part.granules):
        return 0
    for seed, address in zip(part.seeds.tolist(), part.addresses.tolist(), strict=True):
        granules = iter(part.granules.tolist())
        digest, left = xxh3_128(seed=seed + next(granules)), width
        for piece in reader.read((part.offsets.ravel() + address).tolist(), part.piece):
            at = 0
            while at < len(piece):
                size = min(left, len(piece) - at)
                digest.update(piece[at : at + size].data)
                at, left = at + size, left - size
                if not left:
                    total += digest.intdigest()
                    digest, left = xxh3_128(seed=seed + next(granules, 0)), width
    return total


def packed(digest: int) -> bytes:
    """A digest as messages carry it."""
    return (digest % MODULUS).to_bytes(16, "little")


class Stop(Protocol):
    """Says when to give up."""

    def is_set(self) -> bool:
        """Whether the result is not needed any more. Any thread."""


class Arrived(Protocol):
    """What a room has to receive."""

    @property
    def tokens(self) -> int:
        """N: positions of the request."""

    @property
    def prefix(self) -> int:
        """P: positions that decode already held."""

    @property
    def items(self) -> Mapping[str, Items]:
        """Items per component."""


def differing(
    plan: PairPlan,
    arrived: Arrived,
    digests: Mapping[str, bytes],
    stop: Stop,
    reader_of: Callable[[str], Reader | None],
) -> dict[str, str]:
    """Compare the digests of what a writer sent with those of what lies in memory.

    Reads all of what arrived; data threads only.

    Args:
        plan: What the writer wrote.
        arrived: The room's items, to which it wrote.
        digests: The writer's digest of each component.
        stop: If another thread sets it meanwhile, the result is not needed any more.
        reader_of: What reads a component's memory, if it lies on a device.

    Returns:
        Per component that differs, a text with both digests. Nothing if ``stop`` is set.
    """
    found = {}
    for name, part in plan.components.items():
        owed = due(part.source, part.target, arrived.tokens, arrived.prefix)
        if not len(owed):
            continue
        here = packed(digest_of(arrived_bytes(part, arrived.items[name], owed), stop, reader_of(name)))
        there = digests.get(name)
        if here != there:
            found[name] = f"{name}: {there.hex() if there else 'nothing'} sent, {here.hex()} arrived"
    return {} if stop.is_set() else found


class _Memory:
    """Registered memory of this process, as numpy's array interface wants it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "data": (address, True),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _memory(address: int, nbytes: int) -> Bytes:
    return np.asarray(_Memory(address, nbytes))
