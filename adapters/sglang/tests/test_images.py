"""Real SGLang servers with a model that sees images: the tokens of transformers, for two images in one text.

Both servers get the image. Prefill computes it, and decode needs its size for the positions of later tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from engine_processes import running
from support.images import FIRST_WORD, Seen, describe, draw_image, make_seeing
from support.models import VOCABULARY
from support.servers import Pair, Posted

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.servers

COMMON = [
    *("--page-size", "16", "--chunked-prefill-size", "32"),
    # Without these, SGLang prepares images with torchvision, and computes them with a kernel of a card.
    *("--image-processor-backend", "pil", "--mm-attention-backend", "sdpa"),
]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = make_seeing(tmp_path_factory.mktemp("models") / "seeing")
    return made


@pytest.fixture(scope="module")
def pair(seeing: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    config = {"backend": "tcp", "verify": "digest"}
    decode = ["--disaggregation-decode-enable-radix-cache"]
    with running(Pair(tmp_path_factory.mktemp("pair"), seeing, config, common=COMMON, decode=decode)) as pair:
        yield pair


def _words(seed: int, length: int) -> list[int]:
    return random.Random(seed).sample(range(FIRST_WORD, VOCABULARY), length)


def _seen(image: int, text: int = 2, after: int = 60) -> Seen:
    """The image begins in the first chunk of 32 tokens, and ends in the second."""
    return Seen(_words(text, 24), draw_image(image), _words(text + 50, after))


def test_two_images_in_one_text_have_their_own_tokens_and_cached_prefixes(pair: Pair, seeing: Path) -> None:
    answers = {}
    for image in (1, 2):
        seen = _seen(image)
        first, second = pair.generate([], **seen.fields)
        answers[image] = describe(seeing, seen, 8)
        assert (first.tokens, second.tokens) == (answers[image][:1], answers[image]), image
        # The page with the first 16 words is the same for both.
        assert second.body["meta_info"]["cached_tokens"] == (16 if image == 2 else 0)
    assert answers[1] != answers[2]
    for image in (1, 2):
        longer = _seen(image)._replace(after=[*_seen(image).after, *_words(3, 30)])
        _, second = pair.generate([], **longer.fields)
        assert second.tokens == describe(seeing, longer, 8), image
        assert second.body["meta_info"]["cached_tokens"] == 96, image


def test_images_at_once_get_their_own_tokens(pair: Pair, seeing: Path) -> None:
    asked = [_seen(10 + seed % 3, text=10 + seed // 3, after=20 + 5 * seed) for seed in range(9)]
    bodies = [pair.body([], 20, **seen.fields) for seen in asked]
    posted = [(Posted(pair.prefill, body), Posted(pair.decode, body)) for body in bodies]
    for seen, (_, second) in zip(asked, posted, strict=True):
        assert second.answer().tokens == describe(seeing, seen, 20)


def test_another_image_on_the_other_server_fails_the_request(pair: Pair, seeing: Path) -> None:
    right, wrong = _seen(30, text=30), _seen(31, text=30)
    body = pair.body([])
    for to_prefill, to_decode in ((right, wrong), (wrong, right)):
        posted = Posted(pair.prefill, {**body, **to_prefill.fields}), Posted(pair.decode, {**body, **to_decode.fields})
        for each in posted:
            assert each.answer().status == 500, each.answer()
            assert "the two sides hold different requests" in each.answer().text, each.answer()
    for seen in (right, wrong):
        assert pair.generate([], **seen.fields)[1].tokens == describe(seeing, seen, 8)
