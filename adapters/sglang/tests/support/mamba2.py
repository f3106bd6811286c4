"""Configurations of models with Mamba 2, and the channels that a rank of SGLang has of a convolution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .pools import granite, ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

HEADS, DIM, STATE = 8, 8, 4


class Share(NamedTuple):
    """What a rank has of the whole model.

    Attributes:
        channels: Channels of the convolution, in the rank's order.
        heads: Heads of the recurrent state.
    """

    channels: npt.NDArray[np.int64]
    heads: npt.NDArray[np.int64]


def share(text: Any, groups: int, rank: int, width: int) -> Share:
    """What SGLang's own mixer loads on a rank, of weights that are the numbers of channels and of heads.

    On a CPU, SGLang's loader pads weights for another model, and cannot load one group over several ranks. A test has
    to say that this is no CPU.

    Raises:
        AssertionError: SGLang cannot run the model on so many ranks.
    """
    import torch
    from sglang.srt.layers.attention.mamba.mamba import MambaMixer2

    with ranks(rank, width):
        mixer = MambaMixer2(text.mamba2_cache_params, text.hidden_size, True, False, n_groups=groups)
        weight, skips = mixer.conv1d.weight, mixer.D
        total = channels(groups)
        weight.data.fill_(-1.0)
        weight.weight_loader(weight, torch.arange(float(total))[:, None, None].expand(-1, 1, weight.shape[2]))
        skips.weight_loader(skips, torch.arange(float(HEADS)))
    return Share(weight.data[:, 0, 0].long().numpy(), skips.data.long().numpy())


def channels(groups: int) -> int:
    """Channels of the convolution of a whole model."""
    return HEADS * DIM + 2 * groups * STATE


def _granite(groups: int) -> Any:
    text = granite(STATE, groups)
    text.mamba_n_heads, text.mamba_d_head = HEADS, DIM
    return text


def _falcon(groups: int) -> Any:
    """Each layer has attention and Mamba 2."""
    from sglang.srt.configs import FalconH1Config

    return FalconH1Config(
        hidden_size=32,
        num_hidden_layers=3,
        mamba_d_ssm=HEADS * DIM,
        mamba_n_heads=HEADS,
        mamba_d_head=DIM,
        mamba_n_groups=groups,
        mamba_d_state=STATE,
    )


def _nemotron(groups: int) -> Any:
    from sglang.srt.configs import NemotronHConfig

    return NemotronHConfig(
        hidden_size=32,
        layers_block_type=["mamba", "attention", "mamba", "mlp"],
        mamba_num_heads=HEADS,
        mamba_head_dim=DIM,
        n_groups=groups,
        mamba_n_groups=groups,
        ssm_state_size=STATE,
    )


def _mamba2(groups: int) -> Any:
    """No layer has attention."""
    from sglang.srt.configs import Mamba2Config

    return Mamba2Config(
        hidden_size=32,
        num_hidden_layers=3,
        intermediate_size=HEADS * DIM,
        num_heads=HEADS,
        head_dim=DIM,
        n_groups=groups,
        state_size=STATE,
    )


TEXTS: dict[str, Callable[[int], Any]] = {
    "falcon": _falcon,
    "granite": _granite,
    "nemotron": _nemotron,
    "mamba2": _mamba2,
}
"""Configurations of each family, with so many groups."""


def jet_nemotron() -> Any:
    """A gated delta net whose pool does not name its blocks."""
    from sglang.srt.configs import JetNemotronConfig

    jet = {"mode": "chunk", "expand_v": 1.0, "num_heads": 4, "head_dim": 8, "norm_eps": "1e-5", "conv_size": 4}
    more = {"dconv_generator_reduction": 8, "dconv_implementation": "triton"}
    return JetNemotronConfig(
        efficient_attention_config={"jet": {**jet, **more}},
        layer_types=["jet", "attn", "jet"],
        num_hidden_layers=3,
        hidden_size=32,
    )
