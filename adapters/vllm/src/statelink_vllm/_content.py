"""Which request a room is for, as both servers state it to the link."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

import statelink

__all__ = ["content_of_request"]


def content_of_request(request: Any, tokens: int) -> bytes:
    """The content of one of vLLM's requests, over the tokens whose state moves.

    vLLM's own keys of the prefix cache are made of the same things.

    Args:
        request: vLLM's ``Request``.
        tokens: How many of its first tokens are meant.
    """
    adapter, embeddings = request.lora_request, request.prompt_embeds
    return statelink.content_of(
        np.array(request.all_token_ids[:tokens], np.int64),
        adapter=None if adapter is None else adapter.lora_name,
        items=[f"{each.modality} {each.mm_hash or each.identifier}" for each in request.mm_features],
        salt=request.cache_salt,
        embeddings=None if embeddings is None else _hash(embeddings),
    )


def _hash(embeddings: Any) -> bytes:
    """A hash of embeddings that the client gave in place of token ids."""
    values = np.ascontiguousarray(embeddings.float().cpu().numpy(), "<f4")
    return hashlib.sha256(values.data).digest()
