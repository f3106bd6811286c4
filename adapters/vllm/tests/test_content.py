"""Which request a room is for, as the adapter makes it from vLLM's own classes."""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

import statelink
from statelink_vllm.connector import content_of_request

IDS = [5, 6, 7, 8]


def content(tokens: int = len(IDS), **named: Any) -> bytes:
    made = Request("request", IDS if "prompt_embeds" not in named else None, SamplingParams(), None, **named)
    return content_of_request(made, tokens)


def image(digest: str) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", f"adapter:{digest}", PlaceholderRange(0, 2), digest)


def test_a_plain_request_is_its_token_ids() -> None:
    assert content() == statelink.content_of(IDS)
    assert content(3) == statelink.content_of(IDS[:3])
    assert content(cache_salt="a") == statelink.content_of(IDS, salt="a")


def test_an_adapter_is_its_name() -> None:
    here, there = (LoRARequest("sql", number, f"/adapters/{number}") for number in (1, 2))
    assert content(lora_request=here) == content(lora_request=there) == statelink.content_of(IDS, adapter="sql")
    assert content(lora_request=LoRARequest("other", 1, "/adapters/1")) != content(lora_request=here)


def test_images_count_by_their_hashes_in_order() -> None:
    made = [content(mm_features=[image(each) for each in hashes]) for hashes in ("ab", "ba", "a", "ab")]
    assert made[0] == made[3]
    assert len({*made, content()}) == 4


def test_given_embeddings_count() -> None:
    first, second, third = (content(prompt_embeds=torch.full((4, 2), value)) for value in (0.5, 0.25, 0.5))
    assert first == third
    assert len({first, second, content()}) == 3
