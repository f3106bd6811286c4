"""Real SGLang servers with a draft model: tokens, and how many drafts are accepted, as on one server.

DeepSeek V3 with one layer that predicts the token after the next. If the draft's pages or its rows did not arrive, the
tokens would still be right, and fewer drafts would be accepted.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from engine_processes import running
from support.families import make_with_draft
from support.models import prompt_of
from support.servers import Alone, Answer, Pair, Server

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

COMMON = ["--page-size", "1", "--chunked-prefill-size", "32", "--attention-backend", "intel_amx"]
DRAFT = [
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "2"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"),
]
LENGTHS = (5, 17, 33, 40, 64, 100)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = make_with_draft(tmp_path_factory.mktemp("models") / "drafting")
    return made


def _told(answer: Answer) -> tuple[list[int], dict[str, Any]]:
    """The tokens, and what the server says of its drafts."""
    return answer.tokens, {name: value for name, value in answer.body["meta_info"].items() if name.startswith("spec_")}


@pytest.mark.parametrize("schedule", [[], ["--disable-overlap-schedule"]], ids=["overlap", "plain"])
def test_tokens_and_accepted_drafts_are_those_of_one_server(
    drafting: Path, tmp_path: Path, schedule: list[str]
) -> None:
    common = [*COMMON, *DRAFT, *schedule]
    with Alone(tmp_path, drafting, common) as alone:
        expected = [_told(alone.generate(prompt_of(length, length), 40)) for length in LENGTHS]
    # By the number of accepted drafts, how many steps: without an accepted draft, the test would compare nothing.
    assert any(sum(drafts["spec_correct_drafts_histogram"][1:]) for _, drafts in expected), expected
    with running(Pair(tmp_path, drafting, {"backend": "tcp", "verify": "digest"}, common=common)) as pair:
        assert "moves kv, draft.kv, aux of this" in pair.decode.logged()
        for length, right in zip(LENGTHS, expected, strict=True):
            assert _told(pair.generate(prompt_of(length, length), 40)[1]) == right, length


@pytest.mark.parametrize("algorithm", ["STANDALONE"])
def test_a_draft_that_sglang_cannot_start_after_a_transfer_is_refused(
    llama: Path, tmp_path: Path, algorithm: str
) -> None:
    config = {"STATELINK_SGLANG_CONFIG": json.dumps({"backend": "tcp"})}
    options = [
        *("--model-path", str(llama), "--max-total-tokens", "2048", *COMMON, *DRAFT),
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(llama)),
        *("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "statelink"),
        *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
    ]
    server = Server("decode", tmp_path, options, config)
    try:
        server.wait_logged(f"--speculative-algorithm {algorithm}: SGLang's decode cannot start its draft", 60)
        server.wait_end(60)
    finally:
        server.kill()
