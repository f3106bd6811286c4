"""Real SGLang servers with pipeline stages, on either side: five layers, split unequally."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.families import FAMILIES
from support.models import generate, make_llama, prompt_of
from support.stages import RANKS, STAGES, agree, answers_are_right, flushed, pair_of, storm

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = make_llama(tmp_path_factory.mktemp("models") / "deep", layers=5)
    return made


def test_two_stages_of_prefill_and_one_of_decode(deep: Path, tmp_path: Path) -> None:
    with pair_of(tmp_path, deep, STAGES, []) as pair:
        answers_are_right(pair, deep)
        # The last stage has the rows, which hold the first token.
        assert "moves kv of this prefill rank 0 of 2" in pair.prefill.logged()
        assert "moves kv, aux of this prefill rank 1 of 2" in pair.prefill.logged()
        storm(pair, deep)
        agree(pair, deep)
        prompt = prompt_of(14, 100)
        for server in (pair.prefill, pair.decode):
            for path in ("/release_memory_occupation", "/resume_memory_occupation"):
                server.tell(path, tags=["kv_cache"])
            assert pair.generate(prompt)[1].tokens == generate(deep, prompt, 8)


def test_one_stage_of_prefill_and_two_of_decode(deep: Path, tmp_path: Path) -> None:
    with pair_of(tmp_path, deep, [], STAGES, split="3,2") as pair:
        answers_are_right(pair, deep)
        for rank in (0, 1):
            assert f"moves kv, aux of this decode rank {rank} of 2" in pair.decode.logged()
        storm(pair, deep)
        agree(pair, deep)


def test_two_stages_of_prefill_and_two_ranks_of_decode(deep: Path, tmp_path: Path) -> None:
    with pair_of(tmp_path, deep, STAGES, ["--tp", "2"]) as pair:
        answers_are_right(pair, deep)


def test_two_stages_of_two_dp_ranks_of_prefill(tmp_path: Path) -> None:
    """Four schedulers: each DP rank has two stages, which are an instance of their own. The room says which has it."""
    model = FAMILIES["deepseek"](tmp_path / "deepseek")
    with pair_of(tmp_path, model, [*STAGES, *RANKS], [], split="1,2") as pair:
        answers_are_right(pair, model)
        for rank in ("0 of 2 (DP rank 0 of 2)", "1 of 2 (DP rank 1 of 2)"):
            assert f"of this prefill rank {rank}" in pair.prefill.logged()
        storm(pair, model)
        flushed(pair)
