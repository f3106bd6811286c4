"""Beside an engine that computes, a link needs the interpreter back only after it has waited for something."""

from __future__ import annotations

import re

from tests.helpers.links import Rank, hand_over
from tests.helpers.spinner import Releases

ROOMS = 150
WAITS = {
    "_frames.py:wait",  # for messages, on the control threads
    "poll in _stream.py:wait",  # for batches and replies, on the threads of the backend
}
STRAY = ROOMS // 10
"""So often, a call may let go of it for a cause that is not its own: it happens to collect garbage, which may close a
file, or another thread has waited since before the test set the switch interval. What a request needs comes oftener."""
NOW_AND_THEN = re.compile(r"\b(_process|_inspect|selectors|_listener|threading)\.py:")
"""What is not done for a request: looking whether the peer's process lives, and listening."""
CONFIG = {"role": "prefill", "backend": "tcp"}


def test_a_small_request_lets_go_of_the_interpreter_only_to_wait() -> None:
    """Every other call that lets go of it costs up to 5 ms: see docs/performance.md."""
    releases = Releases()
    releases.watch()
    source, target = Rank("p", 1), Rank("d")
    with source.open(CONFIG) as prefill, target.open(CONFIG, role="decode") as decode:
        for _ in range(10):
            hand_over(prefill, decode, source, target)
        with releases.noted():
            for _ in range(ROOMS):
                hand_over(prefill, decode, source, target)
    found = {each for each, count in releases.found.items() if count > STRAY and not NOW_AND_THEN.search(each)}
    assert found & WAITS, "nothing was seen"
    assert found <= WAITS
