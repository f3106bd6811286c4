"""Finds memory that cannot be pinned, before a library that would end the process tries to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from statelink.errors import TransferError
from statelink.pointers import lockable, on_disk, pinned, read_map

from ._errors import unregistered

if TYPE_CHECKING:
    from statelink.state import Region

__all__ = ["check_pinnable"]


def check_pinnable(regions: Sequence[Region], *, backend: str, library: str | None = None) -> None:
    """Refuse host memory that Linux does not pin for a network card that writes to it.

    Reads the process's memory map once, and its limit on locked memory. It does not ask drivers about device memory.
    Memory that passes may still be refused by the card. Never blocks. Safe from any thread.

    Args:
        regions: The regions that are to be registered.
        backend: Name of the backend, for the error.
        library: Name and version of its library, for the error.

    Raises:
        TransferError: A part of a region is not mapped for reading and writing, or is mapped from a file on a disk. Or
            all regions, together with what is pinned, are more than this process may lock.
    """
    host = {number: each for number, each in enumerate(regions) if each.kind == "dram"}
    map_, most = read_map(), lockable()
    if not host or map_ is None:
        return
    first = np.array([each.address for each in host.values()], np.uint64)
    for (number, region), reached in zip(host.items(), map_.reach(first, "rw").tolist(), strict=True):
        if reached < region.address + region.nbytes:
            there = map_.at(reached) or "nothing is mapped there"
            cause = f"byte {reached - region.address} of it is not mapped for reading and writing: {there}"
            raise unregistered(number, region, cause, backend=backend, library=library)
        files = [str(each) for each in map_.over(region.address, region.nbytes) if on_disk(each)]
        if files:
            cause = f"some of it is mapped from a file on a disk: {files[0]}"
            raise unregistered(number, region, cause, backend=backend, library=library)
    wanted, before = sum(each.nbytes for each in host.values()), pinned()
    if 0 <= most < wanted + before:
        cause = f"it is {wanted >> 10} KiB, {before >> 10} KiB are pinned, and this process may lock {most >> 10} KiB"
        raise TransferError("host memory could not be registered", cause=cause, backend=backend, library=library)
