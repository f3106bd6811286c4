"""The stand-ins for vLLM's kernels: one engine gives the tokens of the model's own code in `transformers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.engines import Engine, engine_options, prompt_of
from support.models import make_hybrid, make_llama, make_windowed, regret

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.servers

WINDOW = 64


# vLLM normalises what leaves a Mamba2 layer by group of heads, and `transformers` over all heads: with one group, both
# agree. Its window of Cohere2 has one token more than that of `transformers`: the token itself does not count.
@pytest.mark.parametrize(
    ("make", "own", "changed"),
    [
        pytest.param(make_llama, {}, {}, id="full attention"),
        pytest.param(make_windowed, {"window": WINDOW}, {"sliding_window": WINDOW + 1}, id="windows"),
        pytest.param(make_hybrid, {"groups": 1}, {}, id="Mamba2"),
    ],
)
def test_the_tokens_are_those_of_transformers(
    make: Callable[..., Path], own: dict[str, Any], changed: dict[str, Any], tmp_path: Path
) -> None:
    model = make(tmp_path / "model", **own)
    engine = Engine("one", tmp_path, engine_options(model)).wait_ready()
    try:
        for length in (1, 33, 64, 100, 200, 333):
            prompt = prompt_of(length, length)
            assert regret(model, prompt, engine.run(f"of {length}", prompt, 12).tokens, **changed) < 1e-3, length
    finally:
        engine.kill()


def test_a_step_of_mamba2_with_drafts_is_as_many_steps_of_one_token() -> None:
    """Of the tokens of each step some are taken, and the others are wrong. The next step begins behind the former."""
    import torch
    from support.kernels.convolutions import drafted
    from vllm import _custom_ops as kernels
    from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import selective_state_update
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    heads, dim, groups, wide, back, width, requests, count = 4, 8, 2, 16, 3, 4, 2, 20
    parts = (heads * dim, groups * wide, groups * wide)
    draw = torch.Generator().manual_seed(1)

    def some(*shape: int) -> Any:
        return torch.randn(shape, generator=draw)

    weight, bias = some(sum(parts), back + 1), some(sum(parts))
    a, d, pace_bias = -some(heads).abs(), some(heads), some(heads)

    def update(states: Any, made: Any, paces: Any, slots: Any, *more: Any) -> Any:
        """What follows the convolution, as in vLLM's layer."""
        x, b, c = made.split(parts, -1)
        x, b, c = x.unflatten(-1, (heads, dim)), b.unflatten(-1, (groups, wide)), c.unflatten(-1, (groups, wide))
        out, (accepted, starts) = torch.empty_like(x), more or (None, None)
        selective_state_update(
            states,
            x,
            paces[..., None].expand(-1, -1, dim),
            a[:, None, None].expand(-1, dim, wide),
            b,
            c,
            d[:, None].expand(-1, dim),
            dt_bias=pace_bias[:, None].expand(-1, dim),
            dt_softplus=True,
            state_batch_indices=slots,
            dst_state_batch_indices=slots,
            out=out,
            num_accepted_tokens=accepted,
            cu_seqlens=starts,
        )
        return out

    tokens, paces = some(requests, count, sum(parts)), some(requests, count, heads)
    # Each token of a step has a state of its own, and all of them one row of inputs.
    table = torch.arange(1, requests * width + 1, dtype=torch.int32).reshape(requests, width)
    slots = table[:, 0]
    inputs, states = some(requests * width + 1, sum(parts), back), some(requests * width + 1, heads, dim, wide)
    pool, kept = (
        torch.cat((inputs, torch.full((len(inputs), sum(parts), width - 1), torch.nan)), dim=-1),
        states.clone(),
    )
    alone = []
    for place in range(count):
        made = kernels.causal_conv1d_update_cpu_vec(tokens[:, place], inputs, weight, bias, "silu", slots, None, 0)
        alone.append(update(states, made, paces[:, place], slots))
    wanted = torch.stack(alone, dim=1)

    at, accepted = [0] * requests, [1] * requests
    starts = torch.arange(requests + 1, dtype=torch.int32) * width
    while max(at) + width <= count:
        taken = torch.randint(1, width + 1, (requests,), generator=draw).tolist()
        given, pace = some(requests, width, sum(parts)), some(requests, width, heads)
        for row, (first, number) in enumerate(zip(at, taken, strict=True)):
            given[row, :number] = tokens[row, first : first + number]
            pace[row, :number] = paces[row, first : first + number]
        behind = torch.tensor(accepted, dtype=torch.int32)
        made = drafted(given.flatten(0, 1), pool, weight, bias, "silu", slots=table, accepted=behind, starts=starts)
        out = update(kept, made, pace.flatten(0, 1), table, behind, starts).unflatten(0, (requests, width))
        for row, (first, number) in enumerate(zip(at, taken, strict=True)):
            torch.testing.assert_close(out[row, :number], wanted[row, first : first + number])
        at, accepted = [sum(each) for each in zip(at, taken, strict=True)], taken
    assert min(at) > width
