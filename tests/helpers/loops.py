"""The loop that a link's control thread runs, for tests that ask when it sleeps and what wakes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.peers import until

from statelink.link.runtime import Bell, Loop

if TYPE_CHECKING:
    import statelink


def open_with_loop(open_link: Callable[[], statelink.Link]) -> tuple[statelink.Link, Loop]:
    """A link, and the loop that it has started."""
    started, start = list[Loop](), Loop.start

    def noted(self: Loop, *arguments: Any) -> None:
        started.append(self)
        start(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "start", noted)
        link = open_link()
    (loop,) = started
    return link, loop


def sleeps(loop: Loop) -> None:
    """Wait until the control thread waits, so that a call that wakes it rings."""
    until(lambda: loop.idle)


def note_rings(loop: Loop, monkeypatch: pytest.MonkeyPatch, *, mute: bool = False) -> list[Bell]:
    """The loop's bell, once for each ring from here on. A mute one does not wake the thread."""
    rings, ring = list[Bell](), Bell.ring

    def noted(self: Bell) -> None:
        ours = any(each is self for each in vars(loop).values())
        if ours:
            rings.append(self)
        if not (ours and mute):
            ring(self)

    monkeypatch.setattr(Bell, "ring", noted)
    return rings
