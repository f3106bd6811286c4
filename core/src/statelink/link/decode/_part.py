"""The part of a prefill rank: what it writes for this decode rank, the bytes that it owes, and its granted memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from statelink.errors import PeerError
from statelink.plan import Assignment, PairPlan, compile_pair, due, match, route

if TYPE_CHECKING:
    from statelink.plan import Items, PairPlan
    from statelink.state import Inventory
    from statelink.wire import Handshake

__all__ = ["Grantable", "Part", "plan_instance"]


class Part(NamedTuple):
    """What one prefill rank does for this decode rank.

    Attributes:
        assignment: What it writes.
        plan: The compiled assignment.
        readers: Decode ranks of this instance that it writes to for each room.
        grantable: The memory that it may be granted.
    """

    assignment: Assignment
    plan: PairPlan
    readers: int
    grantable: Grantable

    def owed(self, tokens: int, prefix: int) -> dict[str, int]:
        """Bytes per component that it owes for a request, where there are any. From its plan alone; any thread.

        Raises:
            RoomError: The prefix ends inside an item of a type that moves whole items.
        """
        owed = {
            name: part.granule_nbytes * len(due(part.source, part.target, tokens, prefix))
            for name, part in self.plan.components.items()
        }
        return {name: nbytes for name, nbytes in owed.items() if nbytes}


def plan_instance(ours: Handshake, siblings: Sequence[Handshake], ranks: dict[str, Handshake]) -> dict[str, Part]:
    """Check that both instances are complete and match, route every byte, and compile this rank's plans. Blocks.

    Args:
        ours: This decode rank's handshake.
        siblings: The handshakes of the other ranks of its instance.
        ranks: The handshakes of the prefill ranks, by address.

    Returns:
        By address, the part of each prefill rank that has one.

    Raises:
        PeerError: Ranks are missing, doubled, or of several instances.
        MismatchError: The instances do not fit.
    """
    prefill = _complete([handshake.inventory for handshake in ranks.values()], "prefill")
    decode = _complete([ours.inventory, *(handshake.inventory for handshake in siblings)], "decode")
    match(prefill, decode)
    assignments = route(prefill, decode)
    readers: dict[int, int] = {}
    for assignment in assignments:
        readers[assignment.source] = readers.get(assignment.source, 0) + 1
    mine = {each.source: each for each in assignments if each.target == ours.inventory.rank}
    parts = {}
    for address, handshake in ranks.items():
        part = mine.get(handshake.inventory.rank)
        if part is not None:
            plan = compile_pair(handshake.inventory, ours.inventory, part)
            parts[address] = Part(part, plan, readers[part.source], Grantable(ours.inventory, plan))
    return parts


def _complete(inventories: list[Inventory], role: str) -> list[Inventory]:
    """The inventories in order of rank, if every rank of one instance is there exactly once."""
    first = inventories[0]
    names = {inventory.instance for inventory in inventories}
    if len(names) > 1:
        raise PeerError(
            f"ranks of several {role} instances were given as one",
            cause=", ".join(sorted(names)),
            code="peer.instance",
        )
    sizes = {inventory.ranks: inventory.rank for inventory in reversed(inventories)}
    if len(sizes) > 1:
        raise PeerError(
            f"the ranks of the {role} instance {first.instance!r} disagree about their number",
            cause=", ".join(f"rank {rank} says {size}" for size, rank in sorted(sizes.items())),
            hint="every rank of an instance states the same number of ranks",
            code="peer.ranks",
        )
    ranks = sorted(inventory.rank for inventory in inventories)
    if ranks != list(range(first.ranks)):
        raise PeerError(
            f"the {role} instance {first.instance!r} is not complete",
            cause=f"it has ranks 0 to {first.ranks - 1}, and the given addresses reach ranks {ranks}",
            hint=_lacking(role, ranks),
            code="peer.ranks",
        )
    return sorted(inventories, key=lambda inventory: inventory.rank)


def _lacking(role: str, ranks: list[int]) -> str:
    """A hint where these ranks are not those of the instance."""
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        return (
            f"several links say that they are rank {twice[0]}: pass each rank's own rank=, and ranks=, to describe(), "
            "and each address once"
        )
    siblings = "" if role == "prefill" else "; a decode rank learns of the others through 'siblings'"
    return f"give the address of every rank once{siblings}"


U64 = npt.NDArray[np.uint64]

TRUE: Final = np.ones(1, np.bool_)
RANGES_ONE_BY_ONE: Final = 32
"""Most ranges that are worked out one by one, because numpy's calls then take longer."""


class Grantable:
    """The memory that a writer may be granted. Immutable; worked out once for its part.

    Args:
        inventory: This rank's inventory.
        plan: What the writer writes.
    """

    def __init__(self, inventory: Inventory, plan: PairPlan) -> None:
        found = []
        for share in plan.assignment.shares:
            chosen = set(share.buffers)
            for each in inventory.component(share.component).buffers:
                if each.name in chosen:
                    base = inventory.regions[each.region].address + each.offset
                    found.append((base, each.stride, each.layout.nbytes, share.component))
        # In this order, ranges are sorted, unless one buffer lies between the items of another.
        found.sort(key=lambda buffer: buffer[0])
        self._components = [component for *_, component in found]
        """The component of each buffer that the writer writes to."""
        self._numbers = [tuple(numbers) for *numbers, _ in found]
        """Of each of them: the address of item 0, the bytes from one item to the next, and the bytes of an item."""
        self._buffers = np.array(self._numbers, np.uint64).reshape(-1, 3).T.copy()
        """The same, a row each."""
        self._each = Counter(self._components)

    def count(self, items: Mapping[str, Items]) -> int:
        """Most ranges that these items become."""
        count = 0
        for component, buffers in self._each.items():
            count += buffers * len(items[component].ids)
        return count

    def ranges(self, items: Mapping[str, Items], elsewhere: Collection[str]) -> tuple[U64, U64]:
        """The address ranges of accepted items, in the buffers that the writer writes to. Items are granted whole.

        Args:
            items: Accepted items per component.
            elsewhere: Components whose bytes go to the strategy's own memory.

        Returns:
            Addresses and lengths in bytes; sorted, disjoint, and merged where they touch.
        """
        rows = [row for row, component in enumerate(self._components) if component not in elsewhere]
        if self.count(items) <= RANGES_ONE_BY_ONE:
            return self._few(items, rows)
        ids = {component: _ascending(items[component].ids) for component in self._each}
        chosen = [ids[self._components[row]] for row in rows]
        counts = [len(each) for each in chosen]
        if not any(counts):
            return np.empty(0, np.uint64), np.empty(0, np.uint64)
        base, stride, nbytes = self._buffers[:, rows].repeat(counts, axis=1)
        low: U64 = base + stride * np.concatenate(chosen).view(np.uint64)
        end: U64 = low + nbytes
        if not (low[1:] >= low[:-1]).all():
            order = low.argsort(kind="stable")
            low, end = low[order], end[order]
        end = np.maximum.accumulate(end)
        apart = low[1:] > end[:-1]
        if apart.all():
            return low, end - low
        first = np.flatnonzero(np.concatenate((TRUE, apart)))
        last = np.append(first[1:], len(low)) - 1
        return low[first], end[last] - low[first]

    def _few(self, items: Mapping[str, Items], rows: list[int]) -> tuple[U64, U64]:
        """As `ranges`, without numpy."""
        ids = {component: items[component].ids.tolist() for component in self._each}
        named = [(*self._numbers[row], ids[self._components[row]]) for row in rows]
        found = sorted([(base + stride * item, nbytes) for base, stride, nbytes, each in named for item in each])
        low, high = [0] * len(found), [0] * len(found)
        count = end = 0
        for begin, nbytes in found:
            if begin > end or not count:
                low[count] = high[count] = end = begin
                count += 1
            if begin + nbytes > end:
                end = high[count - 1] = begin + nbytes
        addresses = np.array(low[:count], np.uint64)
        return addresses, np.array(high[:count], np.uint64) - addresses


def _ascending(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return ids if len(ids) < 2 or (ids[1:] >= ids[:-1]).all() else np.sort(ids)
