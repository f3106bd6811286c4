"""How a room stands: whom it has to do with, and what it waits for. Every reason of a failure says it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ._stages import Stage

if TYPE_CHECKING:
    from statelink.errors import Reason

    from ._instance import Source
    from ._receiving import Receiving, Writer
    from ._sending import Delivery, Sending

__all__ = ["Party", "explained", "missing_on_decode", "missing_on_prefill", "party_of"]

MAX_NAMED = 8
"""Most peers that a reason names."""


class Party(NamedTuple):
    """A rank of the other side.

    Attributes:
        name: Its link name; its address while that is not known.
        rank: Its rank, once it introduced itself.
        heard: When it was last heard, if it ever was.
    """

    name: str
    rank: int | None
    heard: float | None


def explained(reason: Reason, stands: dict[str, str], parties: Sequence[Party], missing: str, now: float) -> Reason:
    """The same reason, with how the room stood when it arose.

    Args:
        reason: Why the room fails.
        stands: What is known of the room and this side.
        parties: Whom it has to do with.
        missing: What it still waited for.
        now: The time.
    """
    named = [party for party in parties if party.name == reason.who.get("peer")] or list(parties)[:MAX_NAMED]
    ages = ["never" if party.heard is None else f"{max(0.0, now - party.heard):.1f} s ago" for party in named]
    if len(named) > 1:
        whom = [party.name if party.rank is None else f"rank {party.rank}" for party in named]
        ages = [" ".join(each) for each in zip(whom, ages, strict=True)]
    standing = {
        **stands,
        "peer": ", ".join(party.name for party in named),
        "rank": ", ".join(str(party.rank) for party in named if party.rank is not None),
        "missing": missing or "nothing",
        "heard": "; ".join(ages) or "never",
    }
    told = {key: value for key, value in standing.items() if value and key not in reason.who}
    return msgspec.structs.replace(reason, diagnostics=told)


def party_of(source: Source) -> Party:
    """A prefill rank."""
    card = source.card
    if card is None:
        return Party(source.endpoint.address, None, None)
    return Party(card.link, card.inventory.rank, source.heard)


def missing_on_decode(room: Receiving) -> str:
    """What a room of decode still waits for; empty where there is nothing."""
    instance = room._instance
    if not room._requested:
        if instance is None:
            return "prefill"
        if instance.stage is not Stage.READY or instance.suspect:
            silent = instance.silent()
            stage = "silent" if instance.stage is Stage.READY else instance.stage.value
            return f"prefill, which is {stage}" + (f", and an answer from {silent}" if silent else "")
        return "the engine's ready event" if room._accepted else "the engine's accept()"
    return "; ".join(filter(None, map(_missing_of_writer, list(room._writers.values()))))


def _missing_of_writer(writer: Writer) -> str:
    rank = writer.source.card.inventory.rank if writer.source.card else "?"
    if writer.finished is not None:
        return f"{writer.waits} for what came from rank {rank}" if writer.owes else ""
    names = [name for name, nbytes in writer.expected.items() if nbytes]
    begun = [name for name in names if name in writer.came]
    parts = [", ".join(name for name in names if name not in writer.came)]
    parts += [f"the rest of {', '.join(begun)}"] if begun else []
    return f"{' and '.join(filter(None, parts)) or 'the last word'} from rank {rank}"


def missing_on_prefill(room: Sending) -> str:
    """What a room of prefill still waits for; empty where there is nothing."""
    deliveries = list(room._deliveries.values())
    if not deliveries:
        left = room._role.missing(room)
        return "decode's request" if left is None else f"the requests of {left} more decode ranks"
    if room._queue:
        return "the engine's ready event"
    if not room._complete:
        lacking = [each.name for each in room._node.inventory.components if each.name not in room._named]
        push = "the engine's last push" if room._pushes else "the engine's first push"
        return push + (f", with {', '.join(lacking)}" if lacking else "")
    return "; ".join(filter(None, map(_missing_of_delivery, deliveries)))


def _missing_of_delivery(delivery: Delivery) -> str:
    rank = delivery.destination.card.inventory.rank
    if not delivery.finished:
        return f"the transfer to rank {rank}"
    return "" if delivery.accepted else f"the acknowledgement of rank {rank}"
