"""Which request a room is for, as the adapter makes it from SGLang's own classes."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs, Req
from sglang.srt.sampling.sampling_params import SamplingParams

import statelink
from statelink_sglang.backend import content_of_request

IDS = [5, 6, 7, 8]


def request(**named: Any) -> Req:
    return Req("rid", "", array("q", IDS), SamplingParams(), vocab_size=100, **named)


def scheduler(**adapters: str) -> Any:
    """A scheduler that knows adapters by SGLang's id."""
    refs = {lora_id: SimpleNamespace(lora_name=name) for lora_id, name in adapters.items()}
    runner = SimpleNamespace(lora_manager=SimpleNamespace(lora_refs=refs))
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))


def content(made: Req, tokens: int = len(IDS), known: Any = None) -> bytes:
    return content_of_request(made, tokens, known or scheduler())


def test_a_plain_request_is_its_token_ids() -> None:
    assert content(request()) == statelink.content_of(IDS)
    assert content(request(cache_salt="a")) == statelink.content_of(IDS, salt="a")


def test_generated_tokens_count_after_a_retraction() -> None:
    made = request()
    made.output_ids = array("q", [9, 10, 11])
    assert content(made, 6) == statelink.content_of([*IDS, 9, 10])


def test_an_adapter_is_its_name_since_each_server_draws_its_own_id() -> None:
    here, there = request(lora_id="1f"), request(lora_id="2e")
    assert content(here, known=scheduler(**{"1f": "sql"})) == content(there, known=scheduler(**{"2e": "sql"}))
    assert content(here, known=scheduler(**{"1f": "sql"})) == statelink.content_of(IDS, adapter="sql")
    assert content(here, known=scheduler(**{"1f": "sql"})) != content(request())


def test_an_image_counts_by_its_whole_hash() -> None:
    made = [request() for _ in range(3)]
    for each, number in zip(made, (1 << 40, 1 << 41, 1 << 40), strict=True):
        item = MultimodalDataItem(modality=Modality.IMAGE, hash=number)
        each.multimodal_inputs = MultimodalInputs(mm_items=[item])
    first, second, third = map(content, made)
    assert first == third
    assert len({first, second, content(request())}) == 3


def test_given_embeddings_count() -> None:
    made = [request(input_embeds=[[value, 1.0]]) for value in (0.5, 0.25, 0.5)]
    first, second, third = map(content, made)
    assert first == third
    assert len({first, second, content(request())}) == 3
    moved = [
        request(positional_embed_overrides=PositionalEmbeds([torch.full((1, 2), value)], [place]))
        for value, place in ((1.0, 0), (1.0, 1), (2.0, 0))
    ]
    assert len({content(each) for each in moved}) == 3


def test_ids_of_any_form_are_the_same() -> None:
    made = request()
    made.origin_input_ids = np.array(IDS, np.int32)
    assert content(made) == content(request())
