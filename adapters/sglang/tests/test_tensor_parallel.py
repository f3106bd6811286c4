"""Several ranks on a side, of equal and of unequal TP: every rank of decode has what it would have computed itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.pools import GDN_BLOCKS, WINDOW
from support.sides import Lists, Side, move, sides

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("sglang_context")]

N = 128
"""Tokens: whole pages in every pool, so that whole items can be compared."""
DIGEST = {"verify": "digest"}
SHARED = {"mla": ("kv", "aux"), "dsa": ("kv", "dsa", "aux"), "minimax": ("minimax_index_k", "aux")}
"""Parts of which every rank has the same; in other pools these are the metadata rows alone."""


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["mha", "swa", "gdn", "mla", "dsa", "minimax"])
def test_every_rank_has_its_share(kind: str, prefill: int, decode: int) -> None:
    with sides(kind, prefill, decode, own=(DIGEST, DIGEST)) as (sources, targets):
        ours, theirs = Lists.draw(sources[0], N, 4), Lists.draw(targets[0], N, 5)
        for number, source in enumerate(sources):
            source.fill(6 + number)
            for part in SHARED.get(kind, ("aux",)):
                for first, own in zip(sources[0].buffers(part), source.buffers(part), strict=True):
                    own[:] = first
        move(sources, targets, ours, theirs, N, [64])
        for part in SHARED.get(kind, ("aux",)):
            for target in targets:
                for a, b in zip(sources[0].buffers(part), target.buffers(part), strict=True):
                    sent, arrived = a[ours.indices(part, sources[0], N, 0)], b[theirs.indices(part, target, N, 0)]
                    assert sent.any()
                    assert np.array_equal(sent, arrived), part
        if "kv" not in SHARED.get(kind, ()):
            whole = zip(_whole(kind, sources, ours), _whole(kind, targets, theirs), strict=True)
            for (name, sent), (_, arrived) in whole:
                assert sent.any()
                assert np.array_equal(sent, arrived), name


def _whole(kind: str, ranks: list[Side], lists: Lists) -> Iterator[tuple[str, npt.NDArray[np.int32]]]:
    """What all ranks have together: keys and values by layer in the order of positions and heads, and states."""
    for layer in {"mha": range(2), "swa": range(4), "minimax": range(6)}.get(kind, [3]):
        windowed = kind == "swa" and layer != 2
        pages = lists.window if windowed else lists.pages
        slots = (pages[:, None] * 16 + np.arange(16)).reshape(-1)[N - WINDOW if windowed else 0 : N]
        for name in ("get_key_buffer", "get_value_buffer"):
            shares = [_bits(getattr(side.made.pools.pages, name)(layer))[slots] for side in ranks]
            yield f"{name}({layer})", np.concatenate(shares, axis=1)
    if kind == "gdn":
        caches = [side.made.pools.requests.mamba_pool.mamba_cache for side in ranks]
        yield "ssm", np.concatenate([_bits(cache.temporal)[:, lists.slot] for cache in caches], axis=1)
        (convs,) = zip(*(cache.conv for cache in caches), strict=True)
        shares = [_bits(conv)[:, lists.slot] for conv in convs]
        # A rank has its share of each block, one after the other.
        ends = np.cumsum([block // len(ranks) for block in GDN_BLOCKS])[:-1]
        blocks = zip(*(np.split(share, ends, axis=1) for share in shares), strict=True)
        yield "conv", np.concatenate([share for block in blocks for share in block], axis=1)


def _bits(tensor: Any) -> npt.NDArray[np.int32]:
    """Random bits may be no numbers, which are equal to nothing. Elements may be of two bytes or of four."""
    import torch

    whole = torch.int16 if tensor.element_size() == 2 else torch.int32
    found: npt.NDArray[np.int32] = tensor.view(whole).numpy()
    return found
