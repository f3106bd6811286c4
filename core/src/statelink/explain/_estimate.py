"""How long a request takes at least, for a bandwidth."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from statelink.errors import ConfigError

if TYPE_CHECKING:
    from ._report import Report

__all__ = ["Estimate", "estimate"]


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The least seconds that a request takes.

    Attributes:
        bytes: What its bytes take, if blocks cost nothing.
        consecutive: The same, or what its blocks take if that is longer, with consecutive pages.
        scattered: The same with scattered pages.
        slowest: The rank that takes longest with scattered pages: ``prefill`` or ``decode``, and its number.
    """

    bytes: float
    consecutive: float
    scattered: float
    slowest: tuple[str, int]


def estimate(report: Report, bytes_per_second: float, block_seconds: float = 0.0) -> Estimate:
    """Estimate a request's time. Every rank has a network card of its own, and all move at once.

    Args:
        report: The plan.
        bytes_per_second: What one rank sends or receives.
        block_seconds: What one block costs the library at its source, such as `Capabilities.block_seconds`.

    Raises:
        ConfigError: A number is not above 0, or below it.
    """
    if not bytes_per_second > 0 or not block_seconds >= 0:
        raise ConfigError("a time cannot be estimated", cause="the bandwidth has to be above 0")
    moved: dict[tuple[str, int], int] = defaultdict(int)
    blocks: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    for flow in report.flows:
        for rank in (("prefill", flow.source), ("decode", flow.target)):
            moved[rank] += flow.nbytes
        posted = blocks["prefill", flow.source]
        posted[0] += flow.blocks
        posted[1] += flow.blocks_random
    if not moved:
        return Estimate(bytes=0.0, consecutive=0.0, scattered=0.0, slowest=("prefill", 0))
    wire = {rank: nbytes / bytes_per_second for rank, nbytes in moved.items()}
    each = [
        {rank: max(seconds, blocks[rank][order] * block_seconds) for rank, seconds in wire.items()} for order in (0, 1)
    ]
    slowest = max(each[1], key=lambda rank: each[1][rank])
    return Estimate(
        bytes=max(wire.values()),
        consecutive=max(each[0].values()),
        scattered=each[1][slowest],
        slowest=slowest,
    )
