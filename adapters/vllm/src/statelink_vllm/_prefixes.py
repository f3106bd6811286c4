"""For which first tokens of a request there is state: what a server offers when a request has ended, and what it takes.

A conversation goes on from where it was, and so does a request that moves to another server. The prompt then begins
with the tokens of the request before. State for other tokens would be wrong, so both sides compare what they hold at
the few lengths that an answer offers, and take the longest at which it is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import MambaSpec, iter_layer_specs

from ._content import content_of_request, ids_of_request
from ._early import stays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._params import Prefix

__all__ = ["Prefixes", "longest_of"]


class Prefixes:
    """Knows at which lengths a request of this server has state. Runs on the thread of the engine core.

    Args:
        cache: vLLM's ``KVCacheConfig``.
        left_out: See `SchedulerSide.tokens`.
        drafts: Whether there are drafts.
    """

    def __init__(self, cache: Any, left_out: int, *, drafts: bool) -> None:
        specs = [spec for group in cache.transfer_groups for spec in iter_layer_specs(group.kv_cache_spec)]
        self._all_stay = all(map(stays, specs))
        self._block = max((spec.block_size for spec in specs), default=1)
        self._refusal = ""
        if left_out > 1:
            self._refusal = "a draft model that looks several tokens ahead has no state of the last tokens"
        elif drafts and any(isinstance(spec, MambaSpec) for spec in specs):
            self._refusal = "with drafts, the state of recurrent layers may be behind tokens that were not taken"

    @property
    def refusal(self) -> str:
        """Why this server never has state behind a token that it generated; empty if it has."""
        return self._refusal

    def of(self, request: Any) -> list[int]:
        """The lengths at which an ended request has state, the longest first.

        The first is the end. Where the state of every token has stayed, others are the prompt's end, and a place some
        tokens before each of both: a template may write the end of a text in another way when it is history.
        """
        prompt, end = request.num_prompt_tokens, min(request.num_computed_tokens, request.num_tokens)
        if end <= prompt or not self._all_stay:
            return [end]
        found = {end, prompt, *((each // self._block - 1) * self._block for each in (end, prompt))}
        return sorted((each for each in found if each > 0), reverse=True)


def longest_of(offered: Sequence[Prefix], request: Any, most: int) -> Prefix | None:
    """The longest of what another server offers whose tokens are those of a request.

    Args:
        offered: The longest first.
        request: vLLM's ``Request``.
        most: How many tokens of state the request can use.
    """
    ids = ids_of_request(request)
    for each in offered:
        if each.tokens <= most and each.content == content_of_request(request, each.tokens, ids):
            return each
    return None
