"""Convolutions of Mamba 2, whose blocks SGLang does not name: every rank has its channels, at any TP on the other side.

The oracle is SGLang's own loader of the weights that these channels have.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from support.sides import FAILED, SUCCESS, WAITING, Lists, Side, accept, reason, rooms, send, sides, until

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("sglang_context")]

N = 128
HEADS, DIM, STATE = 4, 16, 8
INNER = HEADS * DIM
GROUPS = {"hybrid": 2, "hybrid, one group": 1}
DIGEST = {"verify": "digest"}


def channels(rank: int, width: int, groups: int) -> list[int]:
    """The channels of the whole model that a rank has, as SGLang loads their weights."""
    import torch
    from sglang.srt.configs.mamba_utils import extra_groups_for_head_shards
    from sglang.srt.layers.attention.mamba import mamba

    extra = extra_groups_for_head_shards(groups, width)
    group = (groups + extra) * STATE, extra * STATE, groups == 1
    held = torch.full(((INNER + 2 * (groups + extra) * STATE) // width, 1), -1.0)
    loader = mamba.mamba_v2_sharded_weight_loader([(INNER, 0, False), group, group], width, rank)
    with mock.patch.object(mamba, "is_cpu", return_value=False):  # on a CPU, it pads, and copies nothing
        loader(held, torch.arange(INNER + 2 * groups * STATE, dtype=torch.float32)[:, None])
    return [int(each) for each in held[:, 0]]


def cache_of(side: Side) -> Any:
    return side.made.pools.requests.mamba_pool.mamba_cache


def bits(tensor: Any) -> npt.NDArray[np.int16]:
    import torch

    found: npt.NDArray[np.int16] = tensor.view(torch.int16).numpy()
    return found


SOME = [(1, 1), (2, 2), (2, 1), (1, 2)]
CASES = [("hybrid", *widths) for widths in SOME] + [
    # SGLang itself copies groups to several ranks only if there is one.
    ("hybrid, one group", *widths)
    for widths in (*SOME, (4, 2), (2, 4), (4, 1))
]


@pytest.mark.parametrize(("kind", "prefill", "decode"), CASES)
def test_every_rank_has_its_channels(kind: str, prefill: int, decode: int) -> None:
    groups = GROUPS[kind]
    draw = np.random.default_rng(8)
    with sides(kind, prefill, decode, own=(DIGEST, DIGEST)) as (sources, targets):
        room = next(rooms)
        ours, theirs = Lists.draw(sources[0], N, 4), Lists.draw(targets[0], N, 5)
        layers, _, _, inputs = bits(cache_of(sources[0]).conv[0]).shape
        truth = draw.integers(-(1 << 15), 1 << 15, (layers, INNER + 2 * groups * STATE, inputs), dtype=np.int16)
        for number, source in enumerate(sources):
            source.fill(6 + number)
            for first, own in zip(sources[0].buffers("aux"), source.buffers("aux"), strict=True):
                own[:] = first
            bits(cache_of(source).conv[0])[:, ours.slot] = truth[:, channels(number, prefill, groups)]
        senders = [source.sender(room) for source in sources]
        receivers = [target.receiver(room, N) for target in targets]
        for receiver, target in zip(receivers, targets, strict=True):
            receiver.init(0)
            accept(receiver, target, theirs, N)
        for sender, source in zip(senders, sources, strict=True):
            until(sender.poll, WAITING)
            send(sender, source, ours, N, [64])
        for transfer in (*receivers, *senders):
            until(transfer.poll, SUCCESS)
        for number, target in enumerate(targets):
            arrived = bits(cache_of(target).conv[0])[:, theirs.slot]
            assert np.array_equal(arrived, truth[:, channels(number, decode, groups)])
        whole = [
            np.concatenate([bits(cache_of(side).temporal)[:, lists.slot] for side in ranks], axis=1)
            for ranks, lists in ((sources, ours), (targets, theirs))
        ]
        assert whole[0].any()
        assert np.array_equal(whole[0], whole[1])


@pytest.mark.parametrize("groups", [None, 4])
def test_a_configuration_that_says_otherwise_is_not_believed(
    groups: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then nobody knows which channels a rank has. Equal TP needs not know."""
    import support.pools

    monkeypatch.setattr(support.pools, "SAID_GROUPS", groups)
    with sides("hybrid", 2, 1, own=(DIGEST, DIGEST)) as (sources, (target,)):
        room = next(rooms)
        for source in sources:
            source.sender(room)
        receiver = target.receiver(room, N)
        receiver.init(0)
        accept(receiver, target, Lists.draw(target, N, 5), N)
        until(receiver.poll, FAILED)
        said = str(reason(receiver))
        assert "do not describe the same state" in said
        assert all(f"convolutions as TP {width} cuts them" in said for width in (1, 2))
