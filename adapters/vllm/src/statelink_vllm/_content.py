"""Which request a room is for, as both servers state it to the link."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

import statelink

__all__ = ["content_of_request", "ids_of_request"]


def content_of_request(request: Any, tokens: int, ids: Any = None) -> bytes:
    """The content of one of vLLM's requests, over the tokens whose state moves.

    vLLM's own keys of the prefix cache are made of the same things. Images and sounds that begin behind these tokens
    are not in it, nor are embeddings behind them.

    Args:
        request: vLLM's ``Request``.
        tokens: How many of its first tokens are meant.
        ids: What `ids_of_request` returned, where a caller needs several contents.
    """
    adapter, embeddings = request.lora_request, request.prompt_embeds
    items = [each for each in request.mm_features if each.mm_position.offset < tokens]
    return statelink.content_of(
        (ids_of_request(request) if ids is None else ids)[:tokens],
        adapter=None if adapter is None else adapter.lora_name,
        items=[f"{each.modality} {each.mm_hash or each.identifier}" for each in items],
        salt=request.cache_salt,
        embeddings=None if embeddings is None else _hash(embeddings[:tokens]),
    )


def ids_of_request(request: Any) -> Any:
    """The ids of all tokens of one of vLLM's requests, those that were generated included."""
    return np.array(request.all_token_ids[:], np.int64)


def _hash(embeddings: Any) -> bytes:
    """A hash of embeddings that the client gave in place of token ids."""
    values = np.ascontiguousarray(embeddings.float().cpu().numpy(), "<f4")
    return hashlib.sha256(values.data).digest()
