"""Plans, from the handshakes of both instances, what each prefill rank writes for this decode rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from statelink.errors import PeerError
from statelink.plan import Assignment, PairPlan, compile_pair, match, route

from ._grant import Grantable
from ._owed import Owed

if TYPE_CHECKING:
    from statelink.state import Inventory
    from statelink.wire import Handshake

__all__ = ["Part", "plan_instance"]


class Part(NamedTuple):
    """What one prefill rank does for this decode rank.

    Attributes:
        assignment: What it writes.
        plan: The compiled assignment.
        readers: Decode ranks of this instance that it writes to for each room.
        grantable: The memory that it may be granted.
        owed: How many bytes it owes for a request.
    """

    assignment: Assignment
    plan: PairPlan
    readers: int
    grantable: Grantable
    owed: Owed


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
            parts[address] = Part(part, plan, readers[part.source], Grantable(ours.inventory, plan), Owed(plan))
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
