"""The prefill side: computes prompts chunk by chunk and leaves their state in the pools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transformers import DynamicCache

from statelink_demo.cache_io import store_layer
from statelink_demo.forward import extend, sample
from statelink_demo.hooks import after_each_layer
from statelink_demo.row_pool import MetadataRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import Qwen3NextForCausalLM

    from statelink_demo.pools import Allocation, StatePools

__all__ = ["ChunkCallback", "LayerCallback", "PrefillEngine", "PrefillRequest"]


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillRequest:
    """One prompt on its way through prefill.

    Attributes:
        room: The request's id on both sides.
        prompt: Its token ids.
        allocation: What it holds of the pools.
        computed: Tokens whose state is in the pools.
        first_token: The sampled token, once the whole prompt is computed.
    """

    room: int
    prompt: tuple[int, ...]
    allocation: Allocation
    computed: int = 0
    first_token: int | None = None
    cache: DynamicCache | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt)

    @property
    def done(self) -> bool:
        """Whether the whole prompt is computed and the metadata row is filled."""
        return self.first_token is not None


ChunkCallback = Callable[[PrefillRequest, int, int], None]
"""Called with the request and the token range `[start, stop)`."""

LayerCallback = Callable[[PrefillRequest, int, int, int], None]
"""Called with the request, the layer and the token range `[start, stop)`."""


class PrefillEngine:
    """Chunked prefill, one request per forward pass.

    Args:
        model: The model.
        pools: Where state goes.
        chunk_tokens: Tokens per forward pass.
        on_chunk: Called after each chunk, when its state is in the pools. At the last one, the metadata row
            is filled too.
        on_layer: Called during the forward pass, when one layer's state for the chunk is in the pools. The
            state of a linear layer covers everything up to `stop`: decode needs that of the last chunk alone.
    """

    def __init__(
        self,
        model: Qwen3NextForCausalLM,
        pools: StatePools,
        *,
        chunk_tokens: int = 64,
        on_chunk: ChunkCallback | None = None,
        on_layer: LayerCallback | None = None,
    ) -> None:
        self.model = model
        self.pools = pools
        self.chunk_tokens = chunk_tokens
        self.on_chunk = on_chunk
        self.on_layer = on_layer

    def admit(self, room: int, prompt: Sequence[int]) -> PrefillRequest:
        """Take memory for a prompt.

        Raises:
            ValueError: The prompt is empty.
            OutOfItemsError: The pools cannot hold it now.
        """
        if not prompt:
            raise ValueError(f"room {room}: the prompt is empty")
        return PrefillRequest(
            room=room,
            prompt=tuple(prompt),
            allocation=self.pools.allocate(len(prompt)),
            cache=DynamicCache(config=self.model.config),
        )

    def step(self, request: PrefillRequest) -> bool:
        """Compute the next chunk and return whether it was the last; what a callback raises comes through."""
        cache = request.cache
        if cache is None:
            raise ValueError(f"room {request.room}: already computed or released")
        start = request.computed
        stop = min(start + self.chunk_tokens, request.tokens)

        def layer_done(layer: int) -> None:
            store_layer(cache, layer, self.pools, request.allocation, start, stop)
            if self.on_layer is not None:
                self.on_layer(request, layer, start, stop)

        with after_each_layer(self.model, layer_done):
            logits = extend(self.model, cache, request.prompt[start:stop])
        request.computed = stop
        if stop == request.tokens:
            token, logprob = sample(logits)
            row = MetadataRow(first_token=token, first_logprob=logprob, tokens=stop, room=request.room)
            self.pools.rows.write(request.allocation.row, row)
            request.first_token = token
            request.cache = None
        if self.on_chunk is not None:
            self.on_chunk(request, start, stop)
        return request.done

    def run(self, request: PrefillRequest) -> int:
        """Compute all that is left of a prompt and return the first token."""
        while not self.step(request):
            pass
        assert request.first_token is not None
        return request.first_token

    def release(self, request: PrefillRequest) -> None:
        """Give the request's memory back, computed or not. The caller vouches that nothing still reads it."""
        request.cache = None
        self.pools.release(request.allocation)
