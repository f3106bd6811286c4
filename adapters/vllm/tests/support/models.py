"""Tiny models with random weights, made on the spot."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 512

COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_configuration(folder: Path) -> Path:
    """A model without weights: enough where vLLM only reads what a model is."""
    from transformers import LlamaConfig

    config = LlamaConfig(**COMMON, num_hidden_layers=3, head_dim=32, architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    return folder


def make_llama(folder: Path, **more: Any) -> Path:
    """Three layers of full attention with two KV heads of 32, the smallest of vLLM's attention on a CPU.

    ``more`` has what is otherwise in the model's configuration.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    return save(folder, LlamaForCausalLM(LlamaConfig(**{**COMMON, **more}, num_hidden_layers=3, head_dim=32)))


def make_wide(folder: Path) -> Path:
    """Eight layers of full attention with eight KV heads of 64: much state for each token, and little to compute."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 16384}
    return save(folder, LlamaForCausalLM(LlamaConfig(**{**COMMON, **heads}, num_hidden_layers=8, head_dim=64)))


def make_windowed(folder: Path, window: int = 64) -> Path:
    """Three layers with a sliding window and one of full attention."""
    from transformers import Cohere2Config, Cohere2ForCausalLM

    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    config = Cohere2Config(**COMMON, num_hidden_layers=4, sliding_window=window, layer_types=kinds, logit_scale=1.0)
    return save(folder, Cohere2ForCausalLM(config))


def make_hybrid(folder: Path, groups: int = 2, **more: Any) -> Path:
    """Three Mamba2 layers and one of full attention. The Mamba2 layers have this many groups of heads.

    ``more`` has what is otherwise in the model's configuration.
    """
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **{**COMMON, **more},
        num_hidden_layers=4,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        shared_intermediate_size=256,
        num_local_experts=0,
        num_experts_per_tok=0,
        position_embedding_type="rope",
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=groups,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=64,
    )
    return save(folder, GraniteMoeHybridForCausalLM(config))


def add_tokenizer(folder: Path, **named: int) -> Path:
    """Let a model take texts: each word ``t70`` is the token 70, and a conversation is what was said in it.

    With ``image=70``, the word ``<image>`` is the token 70 instead.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    known = [*special, *(f"t{number}" for number in range(len(special), VOCABULARY))]
    for name, number in named.items():
        known[number] = f"<{name}>"
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(known)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    made: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    made.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    made.save_pretrained(folder)
    return folder


def save(folder: Path, model: Any) -> Path:
    """Save the model with weights far from zero: a wrong page then changes the tokens."""
    import torch

    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2, generator=generator)
            elif name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.1, generator=generator)
    model.float().save_pretrained(folder)
    return folder


@functools.lru_cache(maxsize=1)
def _loaded(folder: Path, **changed: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # engines compute beside it
    if (folder / "transformers").exists():  # its own names, which vLLM does not know
        folder /= "transformers"
    own = {"dtype": torch.float32, "attn_implementation": "eager", **changed}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **own)
    return model.eval()


def _behind(folder: Path, prompt: Sequence[int], tokens: Sequence[int], **changed: Any) -> tuple[Any, Any]:
    """The logits of each token behind the prompt, by the model's own code, and which of them are the tokens'."""
    import torch

    with torch.no_grad():
        logits = _loaded(folder, **changed)(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1], (torch.arange(len(tokens)), torch.tensor(tokens))


def regret(folder: Path, prompt: Sequence[int], tokens: Sequence[int], **changed: Any) -> float:
    """How much worse these tokens are than the best ones, by the model's own code in `transformers`, in float32.

    Each token is looked at behind the prompt and the tokens before it: how far its logit is below the highest, in
    standard deviations of all logits. The worst of them counts. Zero: each token has the highest logit. ``changed`` has
    what of the model's configuration `transformers` needs otherwise than vLLM.
    """
    behind, taken = _behind(folder, prompt, tokens, **changed)
    return float(((behind.max(dim=1).values - behind[taken]) / behind.std(dim=1)).max())


def apart(folder: Path, prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]) -> float:
    """How far the logprobs of these tokens are from those of the model's own code at most; NaN, if one of them is."""
    import torch

    behind, taken = _behind(folder, prompt, tokens)
    return float((behind.log_softmax(dim=1)[taken] - torch.tensor(logprobs)).abs().max())


def embedding(folder: Path, prompt: Sequence[int]) -> list[float]:
    """What a model of embeddings says of a prompt: its last hidden state, of length one, by `transformers`."""
    import torch

    with torch.no_grad():
        last = _loaded(folder).model(torch.tensor([list(prompt)]), use_cache=False).last_hidden_state[0, -1]
    values: list[float] = (last / last.norm()).tolist()
    return values
