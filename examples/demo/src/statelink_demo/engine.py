"""Two engines, prefill and decode, over pools; and the same calls in one process, which they must reproduce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import DynamicCache

from statelink_demo.forward import after_each_layer, extend, generate, load_cache, sample, store_layer
from statelink_demo.messages import CHUNK_TOKENS
from statelink_demo.pools import MetadataRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import Qwen3NextForCausalLM

    from statelink_demo.messages import Answer
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
        return PrefillRequest(room, tuple(prompt), held, DynamicCache(config=self.model.config))

    def step(self, request: PrefillRequest, on_layer: Callable[[int], None] | None = None) -> bool:
        """Compute the next chunk, and return whether it was the last.

        Args:
            request: The prompt.
            on_layer: Called with each layer during the forward pass, when its state for the chunk is in the pools. The
                state of a linear layer covers everything up to there: decode needs that of the last chunk alone.
        """
        start, stop = request.span

        def layer_done(layer: int) -> None:
            store_layer(request.cache, layer, self.pools, request.held, start, stop)
            if on_layer is not None:
                on_layer(layer)

        with after_each_layer(self.model, layer_done):
            logits = extend(self.model, request.cache, request.prompt[start:stop])
        request.computed = stop
        if request.done:
            self.pools.write_row(request.held.row, MetadataRow(*sample(logits), stop, request.room))
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
    cache = load_cache(model, pools, held, row.tokens)
    return generate(model, cache, row.first_token, row.first_logprob, count)


def reference(model: Qwen3NextForCausalLM, prompt: Sequence[int], count: int) -> Answer:
    """Serve one prompt with the chunks and batch shapes of the engines, its state staying in one cache."""
    cache = DynamicCache(config=model.config)
    for start in range(0, len(prompt), CHUNK_TOKENS):
        logits = extend(model, cache, prompt[start : start + CHUNK_TOKENS])
    return generate(model, cache, *sample(logits), count)
