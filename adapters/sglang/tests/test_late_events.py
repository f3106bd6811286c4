"""Real SGLang servers with overlap, and events that pass late, as those of a card with much to do."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from engine_processes import running
from support.events import LATE
from support.models import generate, prompt_of
from support.servers import Pair, Posted

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

SECONDS = 8.0
WHOLE = "#pending-token: 0"
"""Prefill logs this when it computes the last chunk that waits."""


def test_a_late_event_holds_its_own_request_and_no_other(llama: Path, tmp_path: Path) -> None:
    late = tmp_path / "late"
    common = ["--page-size", "16", "--chunked-prefill-size", "32"]
    config = {"backend": "tcp", "verify": "digest"}
    with running(Pair(tmp_path, llama, config, common=common, environment={LATE: str(late)})) as pair:
        pair.generate(prompt_of(1, 40))
        # With overlap, every chunk but the last is sent before its forward pass is known to have ended.
        computed = pair.prefill.logged().count(WHOLE)
        late.write_text(str(SECONDS))
        slow, aborted = pair.body(prompt_of(2, 100)), pair.body(prompt_of(3, 100), rid="aborted")
        waiting = [Posted(server, body) for body in (slow, aborted) for server in (pair.prefill, pair.decode)]
        until = time.monotonic() + 60
        while pair.prefill.logged().count(WHOLE) == computed:
            assert time.monotonic() < until
            time.sleep(0.05)
        late.unlink()
        for seed in (4, 5, 6):
            prompt = prompt_of(seed, 100)
            assert pair.generate(prompt)[1].tokens == generate(llama, prompt, 8)
        pair.decode.tell("/abort_request", rid="aborted")
        pair.prefill.tell("/abort_request", rid="aborted")
        for each in waiting[2:]:
            assert each.answer(60).status in (200, 400, 500, 503)
        assert waiting[1].answer(60).tokens == generate(llama, prompt_of(2, 100), 8)
        assert pair.generate(prompt_of(7, 60))[1].tokens == generate(llama, prompt_of(7, 60), 8)
        for server in (pair.prefill, pair.decode):
            assert server.running
