"""Checks, before regions are registered, that they are the memory that the inventory says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from statelink.errors import StateError

from ._seen import Location, Origin, Seen

if TYPE_CHECKING:
    from statelink.state import Inventory, Region

    from ._platform import Driver, Platform, Reader

__all__ = ["Checked", "check"]

MOST_PIECES = 1 << 16
"""Most pieces of one region about which a driver is asked. With the smallest pieces, these are 128 GiB."""
MAP = "the process's map"


class Checked(NamedTuple):
    """What is known about an inventory's memory. Nothing of it contradicts the inventory.

    Attributes:
        platform: The platform that was asked.
        regions: The inventory's regions.
        asked: Memory kind to who confirmed all of its regions. A kind is missing if nobody could tell.
        origins: Memory kind to how its regions were allocated.
        indirect: Memory kinds with a region that a network card cannot reach.
        devices: The devices of the regions, as far as drivers know them: the driver, and the device's number.
    """

    platform: Platform
    regions: tuple[Region, ...]
    asked: dict[str, str]
    origins: dict[str, Counter[Origin]]
    indirect: frozenset[str]
    devices: frozenset[tuple[Driver, int]] = frozenset()

    def binding(self) -> Callable[[], None]:
        """What each thread of a link calls first, so that it uses the device of the link's memory, if there is one.

        A thread of a library or of torch that has chosen no device uses the first one. That takes memory of a device
        that may be another rank's, and keeps some transports from working. With memory of several devices, no thread
        prefers one.
        """
        if len(self.devices) != 1:
            return lambda: None
        ((driver, device),) = self.devices
        return driver.binding(device)

    def readers(self) -> dict[str, Reader]:
        """By memory kind of devices: what reads its memory from the host. A kind is missing if nothing can."""
        found: dict[str, Reader] = {}
        for driver, device in self.devices:
            reader = driver.reader(device)
            if reader is not None:
                found[f"cuda:{device}"] = reader
                if len(self.devices) == 1:
                    found["cuda"] = reader
        return found

    def flushing(self) -> Callable[[], None] | None:
        """What makes peers' writes to this memory visible to its devices; ``None`` if nothing has to be done.

        See `Driver.flushing`.
        """
        found = [driver.flushing(device) for driver, device in sorted(self.devices, key=lambda each: each[1])]
        needed = [each for each in found if each is not None]
        if not needed:
            return None

        def flush() -> None:
            for each in needed:
                each()

        return flush

    def summary(self) -> dict[str, dict[str, Any]]:
        """By memory kind: ``regions``, ``bytes``, who ``checked`` it ("" for nobody), how it was ``allocated``."""
        kinds = dict.fromkeys(region.kind for region in self.regions)
        return {
            kind: {
                "regions": sum(region.kind == kind for region in self.regions),
                "bytes": sum(region.nbytes for region in self.regions if region.kind == kind),
                "checked": self.asked.get(kind, ""),
                "allocated": {origin.value: count for origin, count in self.origins.get(kind, Counter()).items()},
            }
            for kind in kinds
        }


def check(inventory: Inventory, *, role: str, platform: Platform) -> Checked:
    """Compare every region with what the platform knows about it. If the platform cannot tell, the region passes.

    Args:
        inventory: The inventory of a rank.
        role: ``prefill``, whose memory is read, or ``decode``, whose memory is written.
        platform: The platform that is asked.

    Raises:
        StateError: A region has another kind than the inventory says, or a part of it does not exist or must not be
            read or written. The error names it, its component, and what the platform says (``state.memory``).
    """
    answers: dict[str, set[str]] = {}
    origins: dict[str, Counter[Origin]] = {}
    indirect: set[str] = set()
    devices: set[tuple[Driver, int]] = set()
    for number, region in enumerate(inventory.regions):
        driver, seen = _ask(inventory, number, platform.drivers)
        if family(region.kind) != "dram":
            answers.setdefault(region.kind, set()).add(driver.name if driver is not None else "")
            if seen is not None and seen.location is Location.DEVICE:
                origins.setdefault(region.kind, Counter())[seen.origin] += 1
                if driver is not None:
                    devices.add((driver, seen.device))
            if seen is not None and seen.direct is False:
                indirect.add(region.kind)
        elif platform.map is not None:
            answers.setdefault(region.kind, set()).add(MAP)
    _check_map(inventory, role, platform)
    asked = {kind: ", ".join(sorted(by)) for kind, by in answers.items() if "" not in by}
    return Checked(platform, inventory.regions, asked, origins, frozenset(indirect), frozenset(devices))


def family(kind: str) -> str:
    """A memory kind without the number of its device."""
    return kind.partition(":")[0]


def _ask(inventory: Inventory, number: int, drivers: Sequence[Driver]) -> tuple[Driver | None, Seen | None]:
    """Who can tell about a region, and what that driver says about its first byte; nothing if nobody can tell."""
    region = inventory.regions[number]
    said = family(region.kind)
    unknown = unstarted = ""
    for driver in drivers:
        seen = driver.look(region.address)
        if seen is None:
            continue
        if seen.location is Location.NOT_STARTED:
            unstarted = unstarted or driver.name
            continue
        if seen.location is Location.UNKNOWN:
            unknown = unknown or driver.name
            continue
        if seen.location is Location.DEVICE and said != "cuda":
            hint = f"describe it as memory of kind 'cuda:{seen.device}'"
            raise _refused(inventory, number, f"{driver.name} says that it is {seen}", hint)
        if said != "cuda":
            return None, None
        if seen.location is Location.HOST:
            hint = "describe it as memory of kind 'dram'"
            raise _refused(inventory, number, f"{driver.name} says that it is {seen}", hint)
        _check_device(inventory, number, driver, seen)
        return driver, seen
    if unknown and said == "cuda":
        hint = "was it freed? Is the address that of the tensor's memory? Host memory is of kind 'dram'"
        raise _refused(inventory, number, f"{unknown} does not know it", hint)
    if unstarted and said == "cuda":
        hint = "CUDA was started before this process was forked, or never: start processes of ranks with 'spawn'"
        raise _refused(inventory, number, f"{unstarted} has not started in this process", hint)
    return None, None


def _check_device(inventory: Inventory, number: int, driver: Driver, first: Seen) -> None:
    """Check that every piece of a region is memory of its device."""
    region = inventory.regions[number]
    index = region.kind.partition(":")[2]
    seen, end = first, region.address + region.nbytes
    address = region.address
    for _ in range(MOST_PIECES):
        at = f"byte {address - region.address} of it" if address > region.address else "it"
        if seen.location is Location.DEVICE and index.isdecimal() and seen.device != int(index):
            hint = f"describe it as memory of kind 'cuda:{seen.device}'; numbers are those after CUDA_VISIBLE_DEVICES"
            raise _refused(inventory, number, f"{driver.name} says that {at} is {seen}", hint)
        if seen.location not in (Location.DEVICE, Location.MANAGED):
            hint = "a region is one allocation, or a part of it: is its length right?"
            raise _refused(inventory, number, f"{driver.name} says that {at} is {seen}", hint)
        if not address < seen.end < end:
            return
        address = seen.end
        found = driver.look(address)
        if found is None:
            return
        seen = found


def _check_map(inventory: Inventory, role: str, platform: Platform) -> None:
    """Check that all host memory may be read, and, if the other side writes to it, be written."""
    host = [number for number, region in enumerate(inventory.regions) if family(region.kind) == "dram"]
    if platform.map is None or not host:
        return
    needed = "r" if role == "prefill" else "rw"
    first = np.array([inventory.regions[number].address for number in host], np.uint64)
    sizes = np.array([inventory.regions[number].nbytes - 1 for number in host], np.uint64)
    reached = platform.map.reach(first, needed)
    wrong = np.flatnonzero(reached <= first + sizes)
    if not len(wrong):
        return
    number, address = host[int(wrong[0])], int(reached[wrong[0]])
    there = platform.map.at(address)
    at = f"byte {address - inventory.regions[number].address} of it, at {address:#x},"
    if there is None:
        found, hint = "is not mapped", "memory must outlive its link: was it freed? Are its address and length right?"
    elif "r" not in there.permissions:
        found = f"must not be read: {there}"
        hint = "if it is memory of a device, describe it as such; if it is guarded, a region has none of the guard"
    else:
        found, hint = f"must not be written: {there}", "decode's memory is written to: map it for writing"
    others = f"; so it is with {len(wrong) - 1} more" if len(wrong) > 1 else ""
    raise _refused(inventory, number, f"{MAP} says that {at} {found}{others}", hint)


def _refused(inventory: Inventory, number: int, cause: str, hint: str) -> StateError:
    region = inventory.regions[number]
    holders = [each.name for each in inventory.components if any(b.count and b.region == number for b in each.buffers)]
    return StateError(
        f"region {number} is not memory of kind {region.kind!r} as it is described",
        cause=f"{region.nbytes} bytes at {region.address:#x}: {cause}",
        hint=hint,
        code="state.memory",
        component=", ".join(holders) or None,
        instance=inventory.instance,
        rank=inventory.rank,
    )
