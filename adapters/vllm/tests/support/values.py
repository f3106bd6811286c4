"""Anything that JSON can hold, and requests with it: what clients may write into ``kv_transfer_params``."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

__all__ = ["ANYTHING", "FIELDS", "fields"]

HERE = "tcp://127.0.0.1:9"

LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**30]),
    st.floats(),
    st.text(st.characters(codec=None)),
    st.sampled_from(["", "\0", "\ud800", "7", "-7", "true", "null", "9" * 5000, "x" * 100_000, HERE, "prefill-0"]),
)
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
"""Anything that JSON can hold, and what parsers of JSON let through besides: NaN, infinities, lone surrogates."""

PEERS = st.lists(st.sampled_from([HERE, "tcp://127.0.0.1:0;127.0.0.1:9", "tcp://10.0.0.9:1", "tcp://127.0.0.1:99999"]))


def fields(peers: st.SearchStrategy[Any] = PEERS) -> st.SearchStrategy[dict[str, Any]]:
    """The fields that are read, each of them right, wrong or missing, and others.

    Args:
        peers: What stands for lists of addresses.
    """
    known: dict[str, st.SearchStrategy[Any]] = {
        "do_remote_prefill": st.booleans() | ANYTHING,
        "do_remote_decode": st.booleans() | ANYTHING,
        "room": st.integers(1, 2**64 - 1).map(str) | ANYTHING,
        "peer": peers | ANYTHING,
        "content": st.sampled_from(["00", "ff" * 16]) | ANYTHING,
        "transfer_id": st.text(min_size=1) | ANYTHING,
        "remote_engine_id": st.just("prefill-0") | ANYTHING,
        "remote_prefill_cached_tokens": st.integers(0, 100) | ANYTHING,
    }
    other = st.dictionaries(st.text(max_size=8), ANYTHING, max_size=2)
    return st.builds(lambda more, found: {**more, **found}, other, st.fixed_dictionaries({}, optional=known))


FIELDS = fields()
