"""Which request a room is for, as both servers state it to the link."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

import statelink

__all__ = ["content_of_request"]


def content_of_request(request: Any, tokens: int, scheduler: Any) -> bytes:
    """The content of one of SGLang's requests, over the tokens whose state moves.

    Args:
        request: SGLang's ``Req``.
        tokens: N. After a retraction, these include tokens that were generated already.
        scheduler: SGLang's ``Scheduler``, which knows the names of adapters.
    """
    ids = np.asarray(request.origin_input_ids)
    if tokens > len(ids):
        ids = np.concatenate([ids, np.asarray(request.output_ids)])[:tokens]
    return statelink.content_of(
        ids,
        adapter=_adapter(request.lora_id, scheduler),
        items=list(_items(request)),
        salt=request.cache_salt,
        embeddings=list(_embeddings(request)),
    )


def _adapter(lora_id: str | None, scheduler: Any) -> str | None:
    """The name of an adapter. SGLang draws its id at random if it was loaded while the server ran."""
    if lora_id is None:
        return None
    manager = scheduler.tp_worker.model_runner.lora_manager
    known = {} if manager is None else manager.lora_refs
    return str(known[lora_id].lora_name) if lora_id in known else lora_id


def _items(request: Any) -> Iterator[str]:
    """SGLang's hash of each image, video or sound. The token ids in its place come from it, and are shorter."""
    inputs = request.multimodal_inputs
    for item in () if inputs is None else inputs.mm_items:
        yield f"{item.modality.name} {item.hash}"


def _embeddings(request: Any) -> Iterator[bytes]:
    """Hashes of embeddings that the client gave, in place of token ids or of some of them."""
    if request.input_embeds is not None:
        yield _hash(request.input_embeds)
    override = request.positional_embed_overrides
    if override is not None:
        yield _hash(override.positions)
        yield _hash(override.embeds.float().cpu())


def _hash(values: Any) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(np.asarray(values, "<f4")).data).digest()
