"""Two real SGLang servers over each native backend: one request of several chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.models import generate
from support.servers import Pair, running

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.smoke, pytest.mark.servers]


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_the_tokens_are_those_of_transformers(backend: str, llama: Path, tmp_path: Path) -> None:
    pytest.importorskip(f"statelink_{backend}")
    prompt = list(range(5, 105))
    config = {"backend": backend, "verify": "digest"}
    common = ["--page-size", "16", "--chunked-prefill-size", "32"]
    with running(Pair(tmp_path, llama, config, common=common)) as pair:
        assert pair.generate(prompt)[1].tokens == generate(llama, prompt, 8)
        for server in (pair.prefill, pair.decode):
            assert f"Statelink backend '{backend}' moves" in server.logged()
