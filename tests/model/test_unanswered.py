"""What the log says of a peer that does not answer."""

from __future__ import annotations

import logging
import re
import time
from typing import TYPE_CHECKING

from tests.helpers import peers
from tests.helpers.links import link_of
from tests.link.decode.test_unanswered import free

from statelink import Status
from statelink.link.decode import _look_up
from statelink.wire import Trouble

if TYPE_CHECKING:
    import pytest


def test_the_log_says_so_after_a_while(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each stage in which an instance waits, not with every beat."""
    monkeypatch.setattr(_look_up, "UNANSWERED_SECONDS", 0.3)
    caplog.set_level(logging.WARNING, "statelink.link")
    with link_of("decode", heartbeat=0.05) as link:
        address = free()
        room = link.receive(1, address, 4, deadline=60)

        def said() -> list[str]:
            return [text for text in map(logging.LogRecord.getMessage, caplog.records) if "no answer from" in text]

        peers.until(lambda: bool(said()))
        time.sleep(0.5)  # many beats
        room.abort()
        assert room.wait(20) is Status.FAILED
    assert len(said()) == 1
    waits = f"prefill instance {address} is still greeting; no answer from "
    assert re.match(rf"{re.escape(link.name)} has waited \d+ s: {re.escape(waits)}", said()[0])
    assert Trouble.REFUSED.what in said()[0]
    assert Trouble.REFUSED.hint in said()[0]
