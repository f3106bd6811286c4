"""Two engines, prefill and decode, over pools; and the same calls in one process, which they must reproduce.

All of them call the model through the functions at the end, so that equal state gives equal bits.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from statelink_demo.messages import CHUNK_TOKENS, Answer
from statelink_demo.pools import MetadataRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import DynamicCache, Qwen3NextForCausalLM

    from statelink_demo.pools import Allocation, StatePools

__all__ = ["PrefillEngine", "PrefillRequest", "RowError", "decode", "reference"]


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """One prompt on its way through prefill.

    Attributes:
        room: The request's id on both sides.
        prompt: Its token ids.
        held: What it holds of the pools.
        cache: What the model keeps between chunks.
        computed: Tokens whose state is in the pools; once it is all of them, the metadata row is filled, too.
    """

    room: int
    prompt: tuple[int, ...]
    held: Allocation
    cache: DynamicCache
    computed: int = 0

    @property
    def done(self) -> bool:
        """Whether the whole prompt is computed."""
        return self.computed == len(self.prompt)

    @property
    def span(self) -> tuple[int, int]:
        """Tokens of the next chunk, `[start, stop)`."""
        return self.computed, min(self.computed + CHUNK_TOKENS, len(self.prompt))


class PrefillEngine:
    """Computes prompts chunk by chunk, one request per forward pass, and leaves their state in the pools."""

    def __init__(self, model: Qwen3NextForCausalLM, pools: StatePools) -> None:
        self.model = model
        self.pools = pools

    def admit(self, room: int, prompt: Sequence[int]) -> PrefillRequest:
        """Take memory for a prompt.

        Raises:
            OutOfItemsError: The pools cannot hold it now.
        """
        held = self.pools.allocate(len(prompt))
        return PrefillRequest(room, tuple(prompt), held, _empty_cache(self.model))

    def step(self, request: PrefillRequest, on_layer: Callable[[int], None] | None = None) -> bool:
        """Compute the next chunk, and return whether it was the last.

        Args:
            request: The prompt.
            on_layer: Called with each layer during the forward pass, when its state for the chunk is in the pools. The
                state of a linear layer covers everything up to there: decode needs that of the last chunk alone.
        """
        start, stop = request.span

        def layer_done(layer: int) -> None:
            _store_layer(request.cache, layer, self.pools, request.held, start, stop)
            if on_layer is not None:
                on_layer(layer)

        with _after_each_layer(self.model, layer_done):
            logits = _extend(self.model, request.cache, request.prompt[start:stop])
        request.computed = stop
        if request.done:
            self.pools.write_row(request.held.row, MetadataRow(*_sample(logits), stop, request.room))
        return request.done


class RowError(ValueError):
    """A metadata row contradicts what decode knows about the request."""


def decode(model: Qwen3NextForCausalLM, pools: StatePools, held: Allocation, room: int, count: int) -> Answer:
    """Generate `count` tokens of one request from what the pools hold, without ever seeing its prompt.

    Raises:
        RowError: The metadata row is not that of a request with this room and as many pages.
    """
    row = pools.read_row(held.row)
    if row.room != room:
        raise RowError(f"row {held.row} belongs to room {row.room}, not to room {room}")
    if row.tokens < 1 or pools.pages_for(row.tokens) != len(held.pages):
        raise RowError(f"room {room}: row {held.row} says {row.tokens} tokens, which is not {len(held.pages)} pages")
    if not 0 <= row.first_token < model.config.vocab_size:
        raise RowError(f"room {room}: row {held.row} holds no token but {row.first_token}")
    cache = _load_cache(model, pools, held, row.tokens)
    return _generate(model, cache, row.first_token, row.first_logprob, count)


def reference(model: Qwen3NextForCausalLM, prompt: Sequence[int], count: int) -> Answer:
    """Serve one prompt with the chunks and batch shapes of the engines, its state staying in one cache."""
    cache = _empty_cache(model)
    for start in range(0, len(prompt), CHUNK_TOKENS):
        logits = _extend(model, cache, prompt[start : start + CHUNK_TOKENS])
    return _generate(model, cache, *_sample(logits), count)


def _empty_cache(model: Qwen3NextForCausalLM) -> DynamicCache:
    from statelink_demo.model_library import DynamicCache

    return DynamicCache(config=model.config)


@torch.inference_mode()
def _extend(model: Qwen3NextForCausalLM, cache: DynamicCache, tokens: Sequence[int]) -> torch.Tensor:
    """Run the model over the next tokens of one sequence and return the last one's logits, `[vocab]`."""
    ids = torch.tensor([list(tokens)])
    output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits: torch.Tensor = output.logits[0, -1].clone()
    return logits


@torch.inference_mode()
def _sample(logits: torch.Tensor) -> tuple[int, float]:
    """Return the most likely token and its log-probability."""
    token = int(logits.argmax())
    return token, float(logits.float().log_softmax(dim=-1)[token])


def _generate(
    model: Qwen3NextForCausalLM, cache: DynamicCache, first_token: int, first_logprob: float, count: int
) -> Answer:
    """Feed `first_token` and generate `count` tokens greedily."""
    logits = _extend(model, cache, (first_token,))
    first_logits: bytes = logits.view(torch.uint8).numpy().tobytes()
    tokens = [_sample(logits)[0]]
    while len(tokens) < count:
        tokens.append(_sample(_extend(model, cache, tokens[-1:]))[0])
    return Answer(first_token, first_logprob, first_logits, tuple(tokens))


@contextmanager
def _after_each_layer(model: Qwen3NextForCausalLM, done: Callable[[int], None]) -> Iterator[None]:
    """Call `done(layer)` right after each decoder layer of every forward pass inside the context."""
    with ExitStack() as stack:
        for layer, module in enumerate(model.model.layers):

            def hook(_module: torch.nn.Module, _args: object, _output: object, layer: int = layer) -> None:
                done(layer)

            stack.callback(module.register_forward_hook(hook).remove)
        yield


def _store_layer(cache: DynamicCache, layer: int, pools: StatePools, held: Allocation, start: int, stop: int) -> None:
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


def _load_cache(model: Qwen3NextForCausalLM, pools: StatePools, held: Allocation, tokens: int) -> DynamicCache:
    """Build a cache of `tokens` tokens from copies of what the pools hold."""
    cache = _empty_cache(model)
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
