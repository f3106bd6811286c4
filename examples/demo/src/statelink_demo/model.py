"""The demo's model: a Qwen3-Next of a few megabytes whose weights depend on a seed alone."""

from __future__ import annotations

import hashlib
import logging
import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

__all__ = ["build_model", "configure_torch", "model_revision", "tiny_config"]


def configure_torch() -> None:
    """Fix the thread count and the algorithms, so that equal calls give equal bits in every process."""
    from statelink_demo.model_library import set_verbosity

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # Silences the notice that the pure-torch kernels are in use: here they are the point.
    set_verbosity(logging.ERROR)


def tiny_config() -> Qwen3NextConfig:
    """Return a Qwen3-Next configuration with every mechanism of the real one, at toy widths.

    Every fourth of its eight layers is full attention, the others are gated delta nets. Key and value head sizes of
    the linear layers differ on purpose: a transposed state cannot go unnoticed.
    """
    from statelink_demo.model_library import Qwen3NextConfig

    return Qwen3NextConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        linear_num_key_heads=4,
        linear_key_head_dim=16,
        linear_num_value_heads=8,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=4096,
    )


def build_model(seed: int = 0) -> Qwen3NextForCausalLM:
    """Build the model with weights drawn from `seed`, in bfloat16 and ready for inference.

    Attention and experts take the eager path: it is the same arithmetic on every machine of one kind.
    """
    from statelink_demo.model_library import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    model: Qwen3NextForCausalLM = factory.from_config(
        tiny_config(), dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_draw(name, parameter.shape, generator))
    model.train(False)
    return model


def model_revision(model: Qwen3NextForCausalLM) -> str:
    """Return a digest of all weights: what two instances compare before they exchange state."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Draw one parameter at a scale that keeps activations, decays and logits lively."""
    weight = torch.empty(shape, dtype=torch.float32)
    if name.endswith("A_log"):
        # Slow decay: the recurrent state still carries the whole prompt when decode reads it.
        return weight.uniform_(0.02, 0.3, generator=generator).log_()
    if name.endswith("dt_bias"):
        return weight.uniform_(-2.0, 0.5, generator=generator)
    if name.endswith("linear_attn.norm.weight"):
        return weight.normal_(1.0, 0.1, generator=generator)
    if len(shape) == 1:
        return weight.normal_(0.0, 0.1, generator=generator)
    if name.endswith("embed_tokens.weight"):
        return weight.normal_(0.0, 1.0, generator=generator)
    return weight.normal_(0.0, 1.0 / math.sqrt(shape[-1]), generator=generator)
