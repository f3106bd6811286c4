"""Convolutions of Mamba 2 at unequal TP: each rank gets the channels that SGLang's own mixer has on that rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.mamba2 import DIM, HEADS, STATE, TEXTS, channels, jet_nemotron, share
from support.pools import Made, make_mamba2
from support.sides import FAILED, Lists, Side, ask, move, reason, rooms, sides, until

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("sglang_context")]

N = 128
"""Tokens: whole pages."""
DIGEST = {"verify": "digest"}
WIDTHS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (1, 4), (4, 1)]
Words = npt.NDArray[Any]


def differing_groups() -> Any:
    """SGLang makes the pool by one of the numbers of groups, and the layers by the other."""
    text = TEXTS["nemotron"](2)
    text.mamba_n_groups = 4
    return text


UNKNOWN = {"jet-nemotron": jet_nemotron, "differing groups": differing_groups}


@pytest.fixture(autouse=True)
def no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's mixer loads weights as on a GPU."""
    from sglang.srt.layers.attention.mamba import mamba

    monkeypatch.setattr(mamba, "is_cpu", lambda: False)


@pytest.mark.parametrize(("prefill", "decode"), WIDTHS)
@pytest.mark.parametrize(
    ("family", "groups"), [("falcon", 1), ("granite", 4), ("nemotron", 8), ("nemotron", 1), ("mamba2", 4)]
)
def test_each_rank_has_the_channels_of_sglangs_mixer(family: str, groups: int, prefill: int, decode: int) -> None:
    text = TEXTS[family](groups)
    with sides(_maker(text), prefill, decode, own=(DIGEST, DIGEST)) as (sources, targets):
        lists = Lists.draw(sources[0], N, 4), Lists.draw(targets[0], N, 5)
        layers, inputs = sources[0].made.pools.requests.mamba_pool.mamba_cache.conv[0].shape[::3]
        # Each element of the whole model's states has a number of its own.
        conv = 1 + np.arange(layers * channels(groups) * inputs, dtype=np.int16).reshape(layers, -1, inputs)
        ssm = 1 + np.arange(layers * HEADS * DIM * STATE, dtype=np.int32).reshape(layers, HEADS, DIM, STATE)
        for number, source in enumerate(sources):
            source.fill(6)  # metadata rows are the same on all ranks
            held = share(text, groups, number, prefill)
            ours = _states(source)
            ours[0][:, lists[0].slot] = conv[:, held.channels]
            ours[1][:, lists[0].slot] = ssm[:, held.heads]
        for target in targets:
            target.fill(7)
        before = [[each.copy() for each in _states(target)] for target in targets]
        move(sources, targets, *lists, N, [64])
        for number, target in enumerate(targets):
            held = share(text, groups, number, decode)
            expected = before[number]
            expected[0][:, lists[1].slot] = conv[:, held.channels]
            expected[1][:, lists[1].slot] = ssm[:, held.heads]
            for state, arrived in zip(expected, _states(target), strict=True):
                assert np.array_equal(state, arrived)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (1, 2), (2, 1)])
@pytest.mark.parametrize("model", UNKNOWN)
def test_unknown_blocks_move_between_equal_tp_only(model: str, prefill: int, decode: int) -> None:
    with sides(_maker(UNKNOWN[model]()), prefill, decode, own=(DIGEST, DIGEST)) as (sources, targets):
        if prefill != decode:
            _is_refused(sources, targets)
            return
        lists = Lists.draw(sources[0], N, 4), Lists.draw(targets[0], N, 5)
        for number, source in enumerate(sources):
            source.fill(6 + number)
            for first, own in zip(sources[0].buffers("aux"), source.buffers("aux"), strict=True):
                own[:] = first
        move(sources, targets, *lists, N, [64])
        for source, target in zip(sources, targets, strict=True):
            for a, b in zip(_states(source), _states(target), strict=True):
                assert np.array_equal(a[:, lists[0].slot], b[:, lists[1].slot])


@pytest.mark.parametrize(
    "change",
    [{"mamba_d_state": STATE * 2}, {"mamba_n_heads": HEADS * 2}, {"mamba_n_groups": 2}, {"mamba_d_head": None}],
)
def test_a_configuration_that_does_not_give_the_pools_shape_names_no_blocks(change: dict[str, Any]) -> None:
    def make(tp: tuple[int, int]) -> Made:
        made = make_mamba2(TEXTS["falcon"](4), tp)
        vars(made.pools.config.hf_text_config).update(change)
        return made

    with sides(make, 1, 2) as (sources, targets):
        _is_refused(sources, targets)


def test_groups_that_sglang_cannot_share_out_are_refused() -> None:
    """SGLang makes the pool, and no layer."""
    text = TEXTS["granite"](3)
    with pytest.raises(AssertionError, match="num_groups must equal 1"):
        share(text, 3, 0, 2)
    with sides(_maker(text), 2, 4) as (sources, targets):
        _is_refused(sources, targets)


def _maker(text: Any) -> Callable[[tuple[int, int]], Made]:
    return lambda tp: make_mamba2(text, tp)


def _is_refused(sources: Sequence[Side], targets: Sequence[Side]) -> None:
    room = next(rooms)
    for source in sources:
        source.sender(room)
    for receiver in [ask(target, room, Lists.draw(target, N, 5), N) for target in targets]:
        until(receiver.poll, FAILED)
        said = str(reason(receiver))
        assert "do not describe the same state" in said
        for width in (len(sources), len(targets)):
            assert f"convolutions as TP {width} cuts them" in said


def _states(side: Side) -> tuple[Words, Words]:
    """The bits of a rank's convolution and of its recurrent state. Random ones may be no numbers."""
    import torch

    cache = side.made.pools.requests.mamba_pool.mamba_cache
    return cache.conv[0].view(torch.int16).numpy(), cache.temporal.view(torch.int32).numpy()
