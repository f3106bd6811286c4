"""How long a request takes at least over a line, and from which length on that is less than computing its prompt."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from statelink.errors import ConfigError

from ._report import explain

if TYPE_CHECKING:
    from ._layout import Side
    from ._report import Report

__all__ = ["Estimate", "Worth", "estimate", "worth"]

ROUND_TRIPS = 1
"""Round trips of a request beside its bytes: decode asks, and the first bytes come. Another one follows where only the
library at the source learns that the last ones have come."""
MOST_TOKENS = 1 << 24
ROUNDING = 1 / 64
"""How exact `worth` is."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The least seconds that a request takes.

    Attributes:
        bytes: What its bytes take, if blocks cost nothing.
        shared: The same, if all ranks share one line.
        consecutive: The same, or what its blocks take if that is longer, with consecutive pages.
        scattered: The same with scattered pages.
        slowest: The rank that takes longest with scattered pages: ``prefill`` or ``decode``, and its number.
    """

    bytes: float
    shared: float
    consecutive: float
    scattered: float
    slowest: tuple[str, int]


def estimate(
    report: Report, bytes_per_second: float, block_seconds: float = 0.0, *, round_trip: float = 0.0
) -> Estimate:
    """Estimate a request's time. All ranks move at once, each over a line of its own unless it is said otherwise.

    Args:
        report: The plan.
        bytes_per_second: What a line carries.
        block_seconds: What one block costs the library at its source, such as `Capabilities.block_seconds`.
        round_trip: Seconds of a round trip. A request takes `ROUND_TRIPS` of them in addition.

    Raises:
        ConfigError: A number is not above 0, or below it.
    """
    if not bytes_per_second > 0 or not block_seconds >= 0 or not round_trip >= 0:
        raise ConfigError("a time cannot be estimated", cause="the rate has to be above 0, and no time below it")
    moved: dict[tuple[str, int], int] = defaultdict(int)
    blocks: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    for flow in report.flows:
        for rank in (("prefill", flow.source), ("decode", flow.target)):
            moved[rank] += flow.nbytes
        posted = blocks["prefill", flow.source]
        posted[0] += flow.blocks
        posted[1] += flow.blocks_random
    away = ROUND_TRIPS * round_trip
    if not moved:
        return Estimate(bytes=away, shared=away, consecutive=away, scattered=away, slowest=("prefill", 0))
    wire = {rank: away + nbytes / bytes_per_second for rank, nbytes in moved.items()}
    each = [
        {rank: max(seconds, away + blocks[rank][order] * block_seconds) for rank, seconds in wire.items()}
        for order in (0, 1)
    ]
    slowest = max(each[1], key=lambda rank: each[1][rank])
    return Estimate(
        bytes=max(wire.values()),
        shared=away + report.nbytes / bytes_per_second,
        consecutive=max(each[0].values()),
        scattered=each[1][slowest],
        slowest=slowest,
    )


class Worth(NamedTuple):
    """The shortest prompts whose state moves in less time than they are computed, in tokens; ``None`` for none.

    Attributes:
        apart: Where each rank has a line of its own.
        shared: Where all ranks share one line.
    """

    apart: int | None
    shared: int | None


def worth(
    prefill: Side, decode: Side, *, tokens_per_second: float, bytes_per_second: float, round_trip: float = 0.0
) -> Worth:
    """From which prompt on moving its state takes less time than computing it, within a 64th.

    The time to compute is taken as proportional to the tokens. In truth, long prompts take longer for each token.

    Args:
        prefill: One side.
        decode: The other side.
        tokens_per_second: Tokens of a prompt that are computed in a second.
        bytes_per_second: See `estimate`.
        round_trip: See `estimate`.

    Raises:
        StatelinkError: As `explain` raises for a prompt of one token.
    """
    known: dict[int, Estimate | None] = {}

    def moving(tokens: int) -> Estimate | None:
        """``None`` for a prompt that fits into no pool."""
        if tokens not in known:
            try:
                report = explain(prefill, decode, tokens=tokens)
            except ConfigError:
                known[tokens] = None
            else:
                known[tokens] = estimate(report, bytes_per_second, round_trip=round_trip)
        return known[tokens]

    def first(which: str) -> int | None:
        low, high = 0, 1
        while (seconds := moving(high)) is not None and getattr(seconds, which) >= high / tokens_per_second:
            low, high = high, 2 * high
            if high > MOST_TOKENS:
                return None
        if seconds is None:
            return None
        while high - low > max(1, high * ROUNDING):
            middle = (low + high) // 2
            seconds = moving(middle)
            if seconds is not None and getattr(seconds, which) < middle / tokens_per_second:
                high = middle
            else:
                low = middle
        return high

    explain(prefill, decode, tokens=1)
    return Worth(first("bytes"), first("shared"))
