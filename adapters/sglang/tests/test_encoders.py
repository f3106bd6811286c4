"""Real SGLang servers that have images encoded by a third server, which prefill and decode both ask."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from engine_processes import running
from support.images import FIRST_WORD, Seen, describe, draw_image, make_seeing
from support.models import VOCABULARY
from support.servers import Pair, Server

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

SEES = ["--image-processor-backend", "pil", "--mm-attention-backend", "sdpa"]
COMMON = [*SEES, "--page-size", "16", "--chunked-prefill-size", "32"]
TRANSFER = ["--encoder-transfer-backend", "zmq_to_scheduler"]


def _words(seed: int, length: int) -> list[int]:
    return random.Random(seed).sample(range(FIRST_WORD, VOCABULARY), length)


def test_images_that_another_server_encoded_have_their_tokens(tmp_path: Path) -> None:
    model = make_seeing(tmp_path / "seeing")
    encoder = Server("encoder", tmp_path, ["--model-path", str(model), *SEES, "--encoder-only", *TRANSFER], {})
    try:
        encoder.wait_ready()
        common = [*COMMON, "--language-only", "--encoder-urls", f"http://127.0.0.1:{encoder.port}", *TRANSFER]
        with running(Pair(tmp_path, model, {"backend": "tcp", "verify": "digest"}, common=common)) as pair:
            for image in (1, 2):
                seen = Seen(_words(2, 24), draw_image(image), _words(52, 20))
                expected = describe(model, seen, 8)
                first, second = pair.generate([], **seen.fields)
                assert (first.tokens, second.tokens) == (expected[:1], expected), image
            assert encoder.logged().count("/encode completed") == 4  # each server asks for each image
    finally:
        encoder.kill()
