"""A draft model's pools beside the model's: every buffer arrives, on the pages that each side names. No scheduler."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from support.pools import make_with_draft
from support.sides import ADDRESS, Lists, Side, at, link_config, move

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("sglang_context")]

N = 256


@pytest.mark.parametrize(
    ("kind", "pages", "states"),
    [
        ("mha", ("kv", "draft.kv"), ()),
        ("mla", ("kv", "draft.kv"), ()),
        ("dsa", ("kv", "draft.kv"), (("dsa", "draft.dsa"),)),
    ],
)
def test_the_drafts_buffers_arrive_as_well(
    kind: str, pages: tuple[str, ...], states: tuple[tuple[str, ...], ...]
) -> None:
    with contextlib.ExitStack() as stack:
        source, target = (
            Side(role, make_with_draft(kind), link_config(role, verify="digest")) for role in ("prefill", "decode")
        )
        for side in (source, target):
            stack.callback(side.close)
            assert (side.lists.pages, side.lists.states) == (pages, states)
        source.fill(3)
        target.prefill_info_table[ADDRESS] = at(source.link.address)
        ours, theirs = Lists.draw(source, N, 4), Lists.draw(target, N, 5)
        move([source], [target], ours, theirs, N, [64])
        for part in ("kv", *(name for names in states for name in names[:1])):  # SGLang's lists have the draft's, too
            buffers = list(zip(source.buffers(part), target.buffers(part), strict=True))
            assert len(buffers) == {"kv": 2 * (2 if kind == "mha" else 1) + (2 if kind == "mha" else 1), "dsa": 3}[part]
            for a, b in buffers:
                sent, arrived = a[ours.indices(part, source, N, 0)], b[theirs.indices(part, target, N, 0)]
                assert sent.any()
                assert np.array_equal(sent, arrived)
