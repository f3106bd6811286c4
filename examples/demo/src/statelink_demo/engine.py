"""A small model, engines for prefill and decode over pools, and the same calls in one process. No Statelink here.

All call the model through the functions at the end, so that equal state gives equal bits.
"""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3NextConfig
from transformers.utils.logging import set_verbosity

from statelink_demo.messages import CHUNK_TOKENS, Answer
from statelink_demo.pools import KV, MAMBA, METADATA

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from statelink_demo.pools import Held, StatePools

Model = Any  # a `transformers.Qwen3NextForCausalLM`


def build_model(seed: int = 0) -> Model:
    """Build a Qwen3-Next with every mechanism of the real one, at toy widths, with weights that depend on a seed alone.

    Every fourth of its layers is full attention, the others are gated delta nets, whose keys and values have heads of
    different sizes: a transposed state cannot go unnoticed. Equal calls give equal bits in every process.
    """
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    set_verbosity(logging.ERROR)  # no notice that the kernels of pure torch are in use: here they are the point
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8}
    attention = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 4096}
    keys = {"linear_num_key_heads": 4, "linear_key_head_dim": 16, "linear_conv_kernel_dim": 4}
    values = {"linear_num_value_heads": 8, "linear_value_head_dim": 32, "shared_expert_intermediate_size": 64}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    every: Any = sizes | attention | keys | values | experts
    given: Any = {"dtype": torch.bfloat16, "attn_implementation": "eager", "experts_implementation": "eager"}
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(Qwen3NextConfig(**every), **given)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_draw(name, torch.empty(parameter.shape), generator))
    model.train(False)
    return model


def _draw(name: str, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw one parameter at a scale that keeps activations, decays and logits lively."""
    if name.endswith("A_log"):  # slow decay: the recurrent state still carries the whole prompt when decode reads it
        return weight.uniform_(0.02, 0.3, generator=generator).log_()
    if name.endswith("dt_bias"):
        return weight.uniform_(-2.0, 0.5, generator=generator)
    if weight.ndim == 1:
        return weight.normal_(1.0 if name.endswith("linear_attn.norm.weight") else 0.0, 0.1, generator=generator)
    scale = 1.0 if name.endswith("embed_tokens.weight") else 1.0 / math.sqrt(weight.shape[-1])
    return weight.normal_(0.0, scale, generator=generator)


class Prefilling:
    """One prompt on its way through prefill. The state of its first `computed` tokens is where `held` says."""

    def __init__(self, model: Model, pools: StatePools, room: int, prompt: Sequence[int]) -> None:
        self._model, self._pools, self._room, self.prompt = model, pools, room, tuple(prompt)
        self.held, self.computed = pools.allocate(len(prompt)), 0
        self._cache = DynamicCache(config=model.config)

    @property
    def span(self) -> tuple[int, int]:
        """Tokens of the next chunk, `[start, stop)`; empty once the prompt is computed."""
        return self.computed, min(self.computed + CHUNK_TOKENS, len(self.prompt))

    def step(self, on_layer: Callable[[int], None] | None = None) -> bool:
        """Compute the next chunk, and return whether it was the last.

        During the forward pass, `on_layer` is called with each layer when its state for the chunk is in the pools. The
        state of a linear layer covers everything up to there: decode needs that of the last chunk alone.
        """
        start, stop = self.span

        def layer_done(layer: int, *_: object) -> None:
            self._store(layer, start, stop)
            if on_layer is not None:
                on_layer(layer)

        with ExitStack() as hooks:
            for layer, module in enumerate(self._model.model.layers):
                hooks.callback(module.register_forward_hook(partial(layer_done, layer)).remove)
            logits = _extend(self._model, self._cache, self.prompt[start:stop])
        self.computed = stop
        if stop == len(self.prompt):
            token, logprob = _sample(logits)
            for row, value in zip(self._pools.rows.values(), (token, stop, logprob, self._room), strict=True):
                row.numpy()[self.held[METADATA][0], 0] = value
        return stop == len(self.prompt)

    def _store(self, layer: int, start: int, stop: int) -> None:
        """Write what one layer computed for the tokens `[start, stop)` from the cache into the pools."""
        # Of a linear layer's convolution inputs, the oldest is never read again, so the pools hold one less.
        entry: Any = self._cache.layers[layer]
        pools, held, (slot,) = self._pools, self.held, self.held[MAMBA]
        if layer in pools.k:
            places = pools.places(held[KV], start, stop)
            pools.k[layer].flatten(0, 1)[places] = entry.keys[0, :, start:stop].transpose(0, 1)
            pools.v[layer].flatten(0, 1)[places] = entry.values[0, :, start:stop].transpose(0, 1)
        else:
            pools.conv[layer][slot] = entry.conv_states[0][0, :, -pools.conv[layer].shape[-1] :]
            pools.recurrent[layer][slot] = entry.recurrent_states[0][0]


def decode(model: Model, pools: StatePools, held: Held, room: int, count: int) -> Answer:
    """Generate `count` tokens of one request from copies of what the pools hold, without ever seeing its prompt.

    Raises ValueError if the metadata row is not that of a request with this room and as many pages.
    """
    (slot,), (at,) = held[MAMBA], held[METADATA]
    token, tokens, logprob, owner = (each.numpy()[at, 0].item() for each in pools.rows.values())
    if owner != room:
        raise ValueError(f"row {at} belongs to room {owner}, not to room {room}")
    if tokens < 1 or pools.pages_for(tokens) != len(held[KV]):
        raise ValueError(f"room {room}: row {at} says {tokens} tokens, which is not {len(held[KV])} pages")
    cache, places = DynamicCache(config=model.config), pools.places(held[KV], 0, tokens)
    for layer in pools.k:
        keys, values = (pool.flatten(0, 1)[places].transpose(0, 1)[None] for pool in (pools.k[layer], pools.v[layer]))
        cache.update(keys.contiguous(), values.contiguous(), layer)
    for layer in pools.conv:
        conv, recurrent = (pool[slot][None].clone() for pool in (pools.conv[layer], pools.recurrent[layer]))
        # A first update is padded on the left up to the kernel, which restores the input that was left out.
        cache.update_conv_state(conv, layer, conv_kernel_size=model.config.linear_conv_kernel_dim)
        cache.update_recurrent_state(recurrent, layer)
    return _generate(model, cache, token, logprob, count)


def reference(model: Model, prompt: Sequence[int], count: int) -> Answer:
    """Serve one prompt with the chunks and batch shapes of the engines, its state staying in one cache."""
    cache = DynamicCache(config=model.config)
    for start in range(0, len(prompt), CHUNK_TOKENS):
        logits = _extend(model, cache, prompt[start : start + CHUNK_TOKENS])
    return _generate(model, cache, *_sample(logits), count)


@torch.inference_mode()
def _extend(model: Model, cache: DynamicCache, tokens: Sequence[int]) -> torch.Tensor:
    """Run the model over the next tokens of one sequence and return the last one's logits, `[vocab]`."""
    output = model(input_ids=torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits: torch.Tensor = output.logits[0, -1].clone()
    return logits


@torch.inference_mode()
def _sample(logits: torch.Tensor) -> tuple[int, float]:
    """Return the most likely token and its log-probability."""
    token = int(logits.argmax())
    return token, float(logits.float().log_softmax(dim=-1)[token])


def _generate(model: Model, cache: DynamicCache, first_token: int, first_logprob: float, count: int) -> Answer:
    """Feed `first_token` and generate `count` tokens greedily."""
    logits = _extend(model, cache, (first_token,))
    tokens = [_sample(logits)[0]]
    while len(tokens) < count:
        tokens.append(_sample(_extend(model, cache, tokens[-1:]))[0])
    return Answer(first_token, first_logprob, logits.view(torch.uint8).numpy().tobytes(), tuple(tokens))
