"""Clauses on strategies: they decide how the planned bytes of a component travel, never which."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest

from statelink.errors import StatelinkError
from statelink.state import Coverage, IndexSpace, state_type

from .._driven import bytes_of, driven
from .._lab import Lab, needs
from .._pools import LABELS
from ._rooms import Links, Rooms
from ._states import TOPOLOGIES, StateTypes

if TYPE_CHECKING:
    from .._bench import Subject

__all__ = ["Strategies"]

GARBAGE = (b"", b"\0", b"\xff" * 8, b"\xff" * 64, b"{}", b"\x93\x01\x02\x03", np.random.default_rng(3).bytes(4096))


class Strategies(Rooms):
    """A strategy for one state type over one backend: its hooks without links, and through real links."""

    strategy: ClassVar[str]
    """The strategy's name. Its package has to be installed."""
    state_type: ClassVar[str] = "kv"
    """The state type that it carries."""
    backend: ClassVar[str] = "tcp"
    """The backend over which it carries that type."""

    @pytest.fixture
    def links(self, subject: Subject, lab: Lab) -> Links:
        """A prefill and a decode. Other clauses use them after this one."""
        kind = state_type(self.state_type)
        whole = kind.index is IndexSpace.PAGE and kind.coverage in (Coverage.SUFFIX, Coverage.WHOLE)
        needs(whole, "this state type has no pages for all positions of a request")
        return lab.links_for_all()

    @property
    def labels(self) -> list[str]:
        """The kit's components of this state type. For a third party's type, these are pages that move as a whole."""
        return [label for label, type in LABELS.items() if type == self.state_type] or [self.state_type]

    def test_it_carries_its_state_type(self, subject: Subject) -> None:
        """The strategy is what carries the state type over the backend, on both sides.

        See that `statelink_strategy` returns it for these two names, and that no other package does.
        """
        with driven(subject, self.labels, 1, 1) as found:
            for each in found:
                for side, carries in (("prefill", each.ours), ("decode", each.theirs)):
                    named = f"{each.component!r} is carried by {carries.name!r} on {side}"
                    assert carries.name == self.strategy, f"{named}, and not by {self.strategy!r}"

    @pytest.mark.parametrize("topology", TOPOLOGIES)
    def test_its_blocks_are_those_of_the_plan(self, subject: Subject, topology: str) -> None:
        """Where it writes in place, its blocks have every byte of a move, each once, and touch nothing else.

        Cut and order the blocks of `move.blocks()` as you like, and yield all of them.
        """
        with driven(subject, self.labels, *TOPOLOGIES[topology]) as found:
            for each in found:
                handed = each.handed()
                if handed is None:
                    needs(False, "it does not write in place")
                    return
                planned, moved = bytes_of(list(each.move.blocks())), bytes_of(handed)
                counts = f"{len(planned)} bytes are planned, and {len(moved)} were handed over"
                said = f"of component {each.component!r}, {counts}"
                twice = len(moved) - len(np.unique(moved[:, 0]))
                assert not twice, f"{said}: {twice} places are written twice"
                assert len(moved) == len(planned), said
                assert (moved == planned).all(), f"{said}, and they go elsewhere or come from elsewhere"

    def test_what_a_peer_says_may_be_anything(self, subject: Subject) -> None:
        """What a peer prepared, and its messages, may be garbage: they are refused, and nothing else is raised.

        Check all of it before it is used, and raise one of Statelink's errors, such as a `WireError`.
        """
        with driven(subject, self.labels, 1, 1) as found:
            for each in found:
                self._refuses("open of its send hook", each.opened)
                self._refuses("message of its send hook", each.told_prefill)
                self._refuses("message of its receive hook", each.told_decode)

    @pytest.mark.parametrize("topology", TOPOLOGIES)
    def test_its_bytes_arrive(self, subject: Subject, lab: Lab, topology: str) -> None:
        """A request arrives byte by byte through real links, between ranks of equal and of unequal width.

        Look at the clause on blocks first; then at what the receive hook does with what has arrived.
        """
        found = StateTypes.moved(subject, lab, *TOPOLOGIES[topology], self.labels)
        wrong = [f"{label or 'the request'}: {problem}" for label, problem in found.items() if problem]
        assert not wrong, "; ".join(wrong)

    def _refuses(self, what: str, call: Callable[[bytes], None]) -> None:
        """Check that garbage is refused or accepted, and that no other error is raised."""
        for raw in GARBAGE:
            try:
                call(raw)
            except (StatelinkError, NotImplementedError):
                continue
            except Exception as error:
                raise AssertionError(f"{what} raised {type(error).__name__} for {raw[:40]!r}: {error}") from error
