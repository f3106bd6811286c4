"""Registration of memory."""

from __future__ import annotations

import contextlib

import pytest

from statelink.backend import Region
from statelink.errors import StatelinkError, TransferError

from .. import _inside
from .._bench import End, Pair, Subject
from .._lab import Lab, Suite
from .._saying import refused

__all__ = ["Registration"]

MANY = ((*[1000 + number % 7 for number in range(300)],), (5000,))


class Registration(Suite):
    """Making memory known."""

    def test_no_memory_at_all_can_be_registered(self, lab: Lab) -> None:
        """A rank without memory registers an empty table, and can be connected.

        Let `register` take an empty table; some libraries refuse an empty list.
        """
        empty, other = lab.end(0, ()).open(), lab.end(1).open()
        empty.connect(other)
        other.connect(empty)

    def test_many_regions_can_be_registered(self, lab: Lab) -> None:
        """Hundreds of small regions at odd addresses are registered, and one batch reaches all of them.

        Register all in one call where the library can, and find a block's region by its number.
        """
        pair = lab.pair(MANY)
        count = len(pair.source.regions)
        pair.fill(5)
        pair.carry(pair.blocks([(n, n % 3, count - 1 - n, n % 2, 990) for n in range(count)]))

    def test_regions_side_by_side_are_apart(self, pair: Pair) -> None:
        """The last bytes of a region and the first of its neighbour move, each as part of its own region.

        Do not merge regions, nor round their borders to pages.
        """
        sizes = [region.nbytes for region in pair.source.regions]
        rows = [
            (0, sizes[0] - 5, 1, 0, 5),
            (1, 0, 0, sizes[0] - 7, 7),
            (2, 0, 2, 0, sizes[2]),
            (3, 1, 3, 2, sizes[3] - 3),
        ]
        pair.fill(6)
        pair.carry(pair.blocks(rows))

    @pytest.mark.parametrize("case", ["overlapping", "the same twice"])
    def test_regions_that_overlap_are_refused_or_work(self, lab: Lab, case: str) -> None:
        """Regions that share bytes, as in an inventory built by hand, are refused with a reason, or all can be used.

        Raise a `TransferError` that names the region, and register none of the others.
        """
        pair = Pair(lab.end(0), lab.end(1).open())
        whole = pair.source.regions[0]
        shift = 100 if case == "overlapping" else 0
        table = (whole, Region(whole.address + shift, whole.nbytes, whole.kind))
        pair.source.construct()
        try:
            pair.source.call(_inside.register, table)
        except TransferError:
            return
        self._usable(pair, table)

    def test_registering_twice_is_refused_or_harmless(self, lab: Lab) -> None:
        """A second registration is refused with a reason, or changes nothing.

        Raise a `TransferError`, and leave what is registered as it is.
        """
        pair = Pair(lab.end(0).open(), lab.end(1).open())
        with contextlib.suppress(TransferError):
            pair.source.call(_inside.register, pair.source.regions)
        self._usable(pair, pair.source.regions)

    def test_a_region_of_no_bytes_is_refused(self, subject: Subject, lab: Lab) -> None:
        """A region has at least one byte, and one of one byte can be registered and moved.

        Take regions of one byte as they are.
        """
        with refused("a region of no bytes", StatelinkError):
            Region(1 << 20, 0)
        pair = lab.pair(((1, 1), (1,)))
        pair.fill(1)
        pair.carry(pair.blocks([(0, 0, 1, 0, 1), (2, 0, 2, 0, 1)]))

    def test_memory_of_an_undeclared_kind_is_refused(self, lab: Lab) -> None:
        """Memory of a kind that it does not declare is refused by name, and the memory that it knows still works.

        Let `register` look at each region's `kind`, and raise a `TransferError` with it before the library is called.
        """
        pair = Pair(lab.end(0), lab.end(1).open())
        pair.source.construct()
        region = pair.source.regions[0]
        with refused("memory of kind 'granite:0'", TransferError, match="granite"):
            pair.source.call(_inside.register, (Region(region.address, region.nbytes, "granite:0"),))
        pair.source.call(_inside.register, pair.source.regions)
        self._usable(pair, pair.source.regions)

    def _usable(self, pair: Pair, table: tuple[Region, ...]) -> None:
        """What is registered moves, in the first region and in the last."""
        source: End = pair.source
        source.regions = table
        source.descriptor = source.call(_inside.descriptor)
        pair.connect()
        pair.fill(3)
        pair.carry(pair.blocks([(0, 7, 0, 9, 5000), (len(table) - 1, 1, 1, 3, 77)]))
