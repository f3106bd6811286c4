"""`make try-vllm` runs what docs/vllm.md shows, answers as one server does, and ends all that it started."""

from __future__ import annotations

import pytest
import try_it
from support.forks import PATH

pytestmark = pytest.mark.servers


@pytest.mark.shows("the request of docs/vllm.md: a tiny pair and one server")
def test_the_pair_answers_as_one_server_and_nothing_stays() -> None:
    printed = try_it.tried(PATH)
    assert "KV Transfer metrics: Transfers=1, Mean time (ms)=" in printed
    assert printed.endswith("the answers are equal\n"), printed
    for role in ("prefill", "decode"):
        assert f"\n{role} rank 0 of " in printed, printed
