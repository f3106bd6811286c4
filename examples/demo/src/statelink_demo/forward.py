"""The only calls into the model. All engines share them, so that equal state gives equal bits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import DynamicCache, Qwen3NextForCausalLM

__all__ = ["Generation", "extend", "generate", "sample"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generation:
    """What decode produced.

    Attributes:
        first_token: The token that prefill sampled and decode was fed.
        first_logprob: Its log-probability, as prefill saw it.
        logits: Logits of decode's first step, `[vocab]`.
        tokens: The tokens that decode generated.
    """

    first_token: int
    first_logprob: float
    logits: torch.Tensor
    tokens: tuple[int, ...]

    def same_as(self, other: Generation) -> bool:
        """Whether both agree in every field, logits bit for bit (NaN equals nothing)."""
        return (
            torch.equal(self.logits, other.logits)
            and self.tokens == other.tokens
            and (self.first_token, self.first_logprob) == (other.first_token, other.first_logprob)
        )

    def logits_digest(self) -> str:
        """Return a digest of the logits' bits, to compare between processes."""
        return hashlib.sha256(self.logits_bytes()).hexdigest()

    def logits_bytes(self) -> bytes:
        """Return the logits' bits."""
        data: bytes = self.logits.view(torch.uint8).numpy().tobytes()
        return data


@torch.inference_mode()
def extend(model: Qwen3NextForCausalLM, cache: DynamicCache, tokens: Sequence[int]) -> torch.Tensor:
    """Run the model over the next tokens of one sequence and return the last one's logits, `[vocab]`."""
    ids = torch.tensor([list(tokens)])
    output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits: torch.Tensor = output.logits[0, -1].clone()
    return logits


@torch.inference_mode()
def sample(logits: torch.Tensor) -> tuple[int, float]:
    """Return the most likely token and its log-probability."""
    token = int(logits.argmax())
    return token, float(logits.float().log_softmax(dim=-1)[token])


def generate(
    model: Qwen3NextForCausalLM, cache: DynamicCache, first_token: int, first_logprob: float, count: int
) -> Generation:
    """Feed `first_token` and generate `count` tokens greedily."""
    logits = first_logits = extend(model, cache, (first_token,))
    tokens = [sample(logits)[0]]
    while len(tokens) < count:
        logits = extend(model, cache, tokens[-1:])
        tokens.append(sample(logits)[0])
    return Generation(first_token=first_token, first_logprob=first_logprob, logits=first_logits, tokens=tuple(tokens))
