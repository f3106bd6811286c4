"""Tiny models with random weights, made on the spot, and what transformers generates with them."""

from __future__ import annotations

import functools
import json
import random
import shutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 512
ORACLE = "transformers"
"""Folder within a model's, of the same model as transformers names it, where that differs."""


def make_llama(folder: Path, context: int = 2048, layers: int = 2, **more: Any) -> Path:
    """Layers of full attention with four heads, two of them KV heads, for prompts of ``context`` tokens."""
    return make_model(
        folder,
        {
            "max_position_embeddings": context,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": layers,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            **more,
        },
    )


def make_windowed(folder: Path, window: int = 32) -> Path:
    """Three layers with a sliding window and one of full attention, which SGLang keeps in two pools.

    SGLang's class takes the window of the configuration, and its attention sees one token more. So it is one less
    than transformers', as SGLang itself makes it for other models.
    """
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    theirs = make_model(
        folder / ORACLE,
        {
            "architectures": ["Cohere2ForCausalLM"],
            "model_type": "cohere2",
            "num_hidden_layers": len(kinds),
            "sliding_window": window,
            "layer_types": kinds,
            "layer_norm_eps": 1e-5,
            "logit_scale": 1.0,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
        },
    )
    for file in theirs.iterdir():
        shutil.copy(file, folder)
    two_pools = {"is_hybrid_swa": True, "hybrid_layer_pattern": [1, 1, 1, 0], "sliding_window": window - 1}
    config = json.loads((theirs / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **two_pools}, indent=1))
    return folder


def generate(folder: Path, prompt: list[int], count: int) -> list[int]:
    """The tokens that transformers generates after a prompt, each the most likely one."""
    import torch

    given = torch.tensor([prompt])
    made = _loaded(folder).generate(given, max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None)
    tokens: list[int] = made[0, len(prompt) :].tolist()
    return tokens


def log_probabilities(folder: Path, prompt: list[int], tokens: list[int]) -> list[float]:
    """How likely transformers takes each of the tokens to be, after the prompt and those before it."""
    import torch

    with torch.no_grad():
        logits = _loaded(folder)(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    said: list[float] = logits.float().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    return said


def embeddings(folder: Path, prompt: list[int]) -> list[list[float]]:
    """The embedding that a model has for each token of a prompt."""
    rows: list[list[float]] = _loaded(folder).get_input_embeddings().weight[prompt].tolist()
    return rows


@functools.cache
def _loaded(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # several would wait for each other beside schedulers that never sleep
    loader: Any = AutoModelForCausalLM
    theirs = folder / ORACLE
    return loader.from_pretrained(theirs if theirs.exists() else folder).float().eval()


def make_model(folder: Path, config: dict[str, Any]) -> Path:
    """A model of any family, with random weights: ``config`` is beside what all families have in common."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True)
    common = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps({**common, **config}))
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"t{n}": n for n in range(4, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    length = {**common, **config}["max_position_embeddings"]
    more = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length}
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, **more}))
    torch.manual_seed(20)
    maker: Any = AutoModelForCausalLM
    model = maker.from_config(AutoConfig.from_pretrained(folder)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            # Weights far from zero: each prompt then has tokens of its own, and a wrong page changes them.
            parameter.normal_(0.0, 0.2) if parameter.dim() > 1 else parameter.normal_(1.0, 0.1)
    model.save_pretrained(folder)
    return folder


def prompt_of(seed: int, length: int) -> list[int]:
    """A prompt without any token twice."""
    return random.Random(seed).sample(range(4, VOCABULARY), length)
