"""Hidden states that real SGLang servers return: decode's are those of one server, and the prompt's are nowhere."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from engine_processes import running
from support.models import VOCABULARY
from support.servers import Alone, Pair

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

COMMON = ["--page-size", "16", "--chunked-prefill-size", "32", "--enable-return-hidden-states"]
PROMPT = random.Random(1).sample(range(4, VOCABULARY), 70)
COUNT = 5


def test_decode_returns_the_states_after_the_prompt(llama: Path, tmp_path: Path) -> None:
    with Alone(tmp_path, llama, COMMON) as alone:
        one = alone.generate(PROMPT, COUNT, return_hidden_states=True)
    _, *expected = one.body["meta_info"]["hidden_states"]  # the first entry is the prompt's
    assert len(expected) == COUNT - 1
    with running(Pair(tmp_path, llama, {"backend": "tcp", "verify": "digest"}, common=COMMON)) as pair:
        first, second = pair.generate(PROMPT, COUNT, return_hidden_states=True)
    assert second.tokens == one.tokens
    found = second.body["meta_info"]["hidden_states"]
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)
    assert first.body["meta_info"]["hidden_states"] == []
