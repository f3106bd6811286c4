"""A tiny model with random weights, made on the spot, that both engines load. The word ``t70`` is the token 70."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LAYERS", "make_llama", "prompt_of"]

VOCABULARY = 512
LAYERS = 3


def make_llama(folder: Path) -> Path:
    """Three layers of full attention with two KV heads of 32, the smallest of vLLM's attention on a CPU."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    maker: Any = LlamaForCausalLM
    model = maker(
        LlamaConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=VOCABULARY,
            max_position_embeddings=2048,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    ).float()
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for parameter in model.parameters():
            # Weights far from zero: each prompt then has tokens of its own, and a wrong page changes them.
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2, generator=generator)
            else:
                parameter.normal_(1.0, 0.1, generator=generator)
    model.save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"t{n}": n for n in range(4, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast: Any = PreTrainedTokenizerFast
    made = fast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")
    made.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"  # Dynamo needs one
    made.save_pretrained(folder)
    return folder


def prompt_of(seed: int, length: int) -> list[int]:
    """A prompt that begins as no other prompt does."""
    return random.Random(seed).choices(range(4, VOCABULARY), k=length)
