"""Staged transfers, forced on for every component: the same bytes arrive, whatever the rings' size, and nothing is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.pools import hybrid
from tests.link.test_topology import TCP, Fleet, sharded
from tests.link.test_verify import OTHER_PAGES, run_by_layers

if TYPE_CHECKING:
    from tests.link.conftest import Workshop

ALWAYS: dict[str, Any] = {"mode": "always", "ring_bytes": 96 << 10, "parcel_bytes": 32 << 10}
"""Rings that are a fraction of a request, and parcels that are a few items."""


@pytest.mark.parametrize(("sources", "targets"), [(2, 1), (1, 2)])
def test_unequal_widths(workshop: Workshop, sources: int, targets: int) -> None:
    fleet = Fleet(
        workshop,
        [sharded(rank, sources) for rank in range(sources)],
        [sharded(rank, targets) for rank in range(targets)],
        staging=ALWAYS,
    )
    fleet.run(200)
    fleet.run(200, 64, (96, 160))
    fleet.run(48, 48)


def test_layouts_and_spans(workshop: Workshop) -> None:
    """Pages of other sizes, prefixes, pushes by layers, and every byte compared by digest as well."""
    made = workshop.pair(verify="digest", staging=ALWAYS)
    made.run()
    made.run(200, 64, (96, 160))
    made.run(48, 48)
    run_by_layers(made)
    other = workshop.pair(hybrid(), OTHER_PAGES, verify="digest", staging=ALWAYS)
    other.run(192, 0, (96,))
    other.run(250, 96)
