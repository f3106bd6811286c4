"""Where a request of the engine comes from: which prompt of a client's request it is, and which answer to it.

A client may send a list of prompts to ``/v1/completions``, and ask for ``n`` answers to each. vLLM makes a request of
each, all with the client's one ``kv_transfer_params``, and answers with those of one of them. Only vLLM's ids tell them
apart: ``{answer}_cmpl-{id}-{prompt}-{8 random digits}``, without ``{answer}_`` if only one answer is wanted.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from vllm import envs

__all__ = ["Place", "place_of"]

RANDOM = 1 + 8
"""Characters that vLLM adds to an id, so that no two requests have the same."""
NUMBER = "[0-9]{1,9}"
ANSWER = re.compile(f"({NUMBER})_(.+)", re.DOTALL)
PROMPT = re.compile(f"cmpl-.*-({NUMBER})", re.DOTALL)


class Place(NamedTuple):
    """A request's place in what a client asked for.

    Attributes:
        prompt: The number of its prompt, from 0.
        answer: The number of its answer among those to the same prompt, from 0.
        name: What the ids of all answers to the same prompt have in common.
        several: Whether several answers are wanted.
    """

    prompt: int
    answer: int
    name: str
    several: bool


def place_of(request: Any) -> Place:
    """Read vLLM's id of a request. Never fails: an id of another form is that of a request with one prompt."""
    name: str = request.request_id
    if request.abort_immediately:  # rejected before it became requests of the engine; the id is the client's own text
        return Place(0, 0, name, several=False)
    answer = ANSWER.fullmatch(name)
    if answer:
        name = answer[2]
    prompt = PROMPT.fullmatch(name if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION else name[:-RANDOM])
    return Place(int(prompt[1]) if prompt else 0, int(answer[1]) if answer else 0, name, several=bool(answer))
