"""The only calls into the model and its cache. All engines share them, so that equal state gives equal bits."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from statelink_demo.messages import Answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import Qwen3NextForCausalLM

    from statelink_demo.pools import Allocation, StatePools

__all__ = ["after_each_layer", "extend", "generate", "load_cache", "sample", "store_layer"]


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
) -> Answer:
    """Feed `first_token` and generate `count` tokens greedily."""
    logits = extend(model, cache, (first_token,))
    first_logits: bytes = logits.view(torch.uint8).numpy().tobytes()
    tokens = [sample(logits)[0]]
    while len(tokens) < count:
        tokens.append(sample(extend(model, cache, tokens[-1:]))[0])
    return Answer(first_token, first_logprob, first_logits, tuple(tokens))


@contextmanager
def after_each_layer(model: Qwen3NextForCausalLM, done: Callable[[int], None]) -> Iterator[None]:
    """Call `done(layer)` right after each decoder layer of every forward pass inside the context."""
    with ExitStack() as stack:
        for layer, module in enumerate(model.model.layers):

            def hook(_module: torch.nn.Module, _args: object, _output: object, layer: int = layer) -> None:
                done(layer)

            stack.callback(module.register_forward_hook(hook).remove)
        yield


def store_layer(cache: DynamicCache, layer: int, pools: StatePools, held: Allocation, start: int, stop: int) -> None:
    """Write what one layer computed for the tokens `[start, stop)` from the cache into the pools.

    A cache keeps keys and values as `[batch, heads, tokens, dim]` and, for a linear layer, as many convolution inputs
    as the kernel has taps. The oldest of them is never read again, so the pools hold one less.
    """
    entry: Any = cache.layers[layer]
    if layer in pools.k:
        places = pools.places(held.pages, start, stop)
        pools.k[layer].flatten(0, 1)[places] = entry.keys[0, :, start:stop].transpose(0, 1)
        pools.v[layer].flatten(0, 1)[places] = entry.values[0, :, start:stop].transpose(0, 1)
    else:
        taps = pools.conv[layer].shape[-1]
        pools.conv[layer][held.slot] = entry.conv_states[0][0, :, -taps:]
        pools.recurrent[layer][held.slot] = entry.recurrent_states[0][0]


def load_cache(model: Qwen3NextForCausalLM, pools: StatePools, held: Allocation, tokens: int) -> DynamicCache:
    """Build a cache of `tokens` tokens from copies of what the pools hold."""
    cache = DynamicCache(config=model.config)
    places = pools.places(held.pages, 0, tokens)
    for layer in pools.k:
        keys, values = (pool.flatten(0, 1)[places].transpose(0, 1)[None] for pool in (pools.k[layer], pools.v[layer]))
        cache.update(keys.contiguous(), values.contiguous(), layer)
    for layer in pools.conv:
        conv, recurrent = (pool[held.slot][None].clone() for pool in (pools.conv[layer], pools.recurrent[layer]))
        # A first update is padded on the left up to the kernel, which restores the input that was left out.
        cache.update_conv_state(conv, layer, conv_kernel_size=model.config.linear_conv_kernel_dim)
        cache.update_recurrent_state(recurrent, layer)
    return cache
