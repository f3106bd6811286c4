"""The decode side: generates from what the pools hold, without ever seeing a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelink_demo.cache_io import load_cache
from statelink_demo.forward import generate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import Qwen3NextForCausalLM

    from statelink_demo.forward import Generation
    from statelink_demo.pools import StatePools

__all__ = ["DecodeEngine", "RowError"]


class RowError(ValueError):
    """A metadata row contradicts what decode knows about the request."""


class DecodeEngine:
    """Greedy decode, one request per forward pass.

    Args:
        model: The model, with the weights that prefill has.
        pools: Where state arrives.
    """

    def __init__(self, model: Qwen3NextForCausalLM, pools: StatePools) -> None:
        self.model = model
        self.pools = pools

    def decode(self, pages: Sequence[int], slot: int, row: int, *, room: int, count: int = 32) -> Generation:
        """Generate `count` tokens of one request.

        Args:
            pages: Its pages, in the order of its tokens.
            slot: Its slot of the linear-attention pools.
            row: Its metadata row, which holds the first token and the length.
            room: Its id, which the row must confirm.
            count: How many tokens to generate after the first.

        Raises:
            RowError: The row is not that of a request with this room and as many pages.
        """
        content = self.pools.rows.read(row)
        if content.room != room:
            raise RowError(f"row {row} belongs to room {content.room}, not to room {room}")
        if content.tokens < 1 or self.pools.pages_for(content.tokens) != len(pages):
            raise RowError(f"room {room}: row {row} says {content.tokens} tokens, which is not {len(pages)} pages")
        if not 0 <= content.first_token < self.model.config.vocab_size:
            raise RowError(f"room {room}: row {row} holds no token but {content.first_token}")
        cache = load_cache(self.model.config, self.pools, pages, slot, content.tokens)
        return generate(self.model, cache, content.first_token, content.first_logprob, count)
