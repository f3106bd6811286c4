"""Real SGLang servers whose prefill has a hierarchical cache: pages that come back from host or files move, too."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from engine_processes import running
from support.models import generate, prompt_of
from support.servers import Pair

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

PAGE = 16
COMMON = ["--page-size", str(PAGE), "--chunked-prefill-size", "32"]
CACHE = [
    *("--hicache-ratio", "4", "--hicache-io-backend", "direct"),
    *("--hicache-mem-layout", "layer_first", "--hicache-write-policy", "write_through", "--max-total-tokens", "1024"),
]


def test_pages_that_come_back_from_the_host_are_right(llama: Path, tmp_path: Path) -> None:
    prefill = ["--enable-hierarchical-cache", *CACHE]
    with running(Pair(tmp_path, llama, {"backend": "tcp", "verify": "digest"}, common=COMMON, prefill=prefill)) as pair:
        first = prompt_of(77, 200)
        others = [prompt_of(900 + seed, 200) for seed in range(8)]  # more than prefill has pages for
        for prompt in [first, first, *others]:
            assert pair.generate(prompt)[1].tokens == generate(llama, prompt, 8)
        again = [*first, *prompt_of(3, 20)]
        answer, decode = pair.generate(again)
        assert decode.tokens == generate(llama, again, 8)
        assert answer.body["meta_info"]["cached_tokens_details"]["host"] >= 176, answer


@pytest.mark.shows("a conversation from files that both servers write")
def test_a_conversation_comes_back_from_files_that_both_servers_write(llama: Path, tmp_path: Path) -> None:
    """Prefill stores the pages of prompts, and decode those of answers. Each turn then finds both in the files."""
    files = [
        "--hicache-storage-backend",
        "file",
        "--hicache-storage-backend-extra-config",
        '{"prefetch_threshold": 16}',
    ]
    stored, count = tmp_path / "stored", 40
    servers = Pair(
        *(tmp_path, llama, {"backend": "tcp", "verify": "digest"}),
        common=[*COMMON, *CACHE, *files],
        prefill=["--enable-hierarchical-cache", "--hicache-storage-prefetch-policy", "wait_complete"],
        decode=["--disaggregation-decode-enable-offload-kvcache"],
        environment={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(stored)},
    )
    with running(servers) as pair:
        said, pages = prompt_of(78, 100), 0
        for turn in range(4):
            prefill, decode = pair.generate(said, count)
            assert decode.tokens == generate(llama, said, count)
            assert prefill.body["meta_info"]["cached_tokens"] == pages * PAGE, prefill
            if turn:  # prefill itself never had the pages of decode's answer
                assert prefill.body["meta_info"]["cached_tokens_details"]["storage"] >= count - PAGE, prefill
            pages = (len(said) + count - 1) // PAGE  # the last token was never computed
            _wait_stored(stored, pages)
            said += [*decode.tokens, *prompt_of(300 + turn, 30)]


def _wait_stored(folder: Path, pages: int) -> None:
    """Return once there is a file for each of so many pages, and each is whole."""
    until = time.monotonic() + 60
    while len(sizes := [file.stat().st_size for file in folder.iterdir()]) < pages or len(set(sizes)) > 1:
        assert time.monotonic() < until, sizes
        time.sleep(0.05)
