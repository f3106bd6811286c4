"""One process, nothing moved: what prefill and decode together must reproduce bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import DynamicCache

from statelink_demo.forward import extend, generate, sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import Qwen3NextForCausalLM

    from statelink_demo.forward import Generation

__all__ = ["reference"]


def reference(
    model: Qwen3NextForCausalLM, prompt: Sequence[int], *, chunk_tokens: int = 64, count: int = 32
) -> Generation:
    """Serve one prompt with the chunks and batch shapes of the engines, its state staying in one cache."""
    cache = DynamicCache(config=model.config)
    logits = extend(model, cache, prompt[:chunk_tokens])
    for start in range(chunk_tokens, len(prompt), chunk_tokens):
        logits = extend(model, cache, prompt[start : start + chunk_tokens])
    return generate(model, cache, *sample(logits), count)
