"""Metadata rows that prefill does not send, because it is an engine of another kind.

SGLang's decode takes the first output token of a request from its row. Without a row, the request itself has to name
the token. A router knows it from prefill's answer.
"""

from __future__ import annotations

from typing import Any

__all__ = ["FIRST_TOKEN", "fill_row", "first_token"]

FIRST_TOKEN = "statelink_first_token"
"""The key in a request's ``sampling_params.custom_params``."""


def first_token(request: Any, vocabulary: int) -> int:
    """The first output token that a request names.

    Args:
        request: SGLang's ``Req``.
        vocabulary: The model's number of tokens.

    Raises:
        ValueError: The request names none, or it asks for something that only a row has, such as logprobs.
    """
    given = getattr(request.sampling_params, "custom_params", None)
    token = given.get(FIRST_TOKEN) if isinstance(given, dict) else None
    if token is None:
        raise ValueError(f"the request's custom_params have no {FIRST_TOKEN!r}")
    if type(token) is not int or not 0 <= token < vocabulary:
        raise ValueError(f"{FIRST_TOKEN!r} is {token!r:.40}, and no token of {vocabulary}")
    for what in ("return_logprob", "return_hidden_states", "return_sampling_mask"):
        if getattr(request, what, False):
            raise ValueError(f"the request has {what!r}, which is not known of a first token that it names itself")
    return token


def fill_row(metadata: Any, row: int, token: int, room: int) -> None:
    """Fill a row of SGLang's ``MetadataBuffers`` as SGLang's prefill does for a request that needs only the token."""
    for name, tensor in vars(metadata).items():
        if hasattr(tensor, "data_ptr"):
            tensor[row] = -1 if name == "output_dsa_topk_indices" else 0
    metadata.output_ids[row, 0] = token
    metadata.bootstrap_room[row, 0] = room
