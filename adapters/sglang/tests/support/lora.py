"""LoRA adapters with random weights, in PEFT's files, and the model that each makes of the base model."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Adapter", "make_adapter"]

RANK = 4
SCALE = 2.0
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Adapter(NamedTuple):
    """An adapter of a model.

    Attributes:
        folder: PEFT's files, which SGLang loads.
        merged: The model whose weights are the base model's and the adapter's together.
    """

    folder: Path
    merged: Path


def make_adapter(folder: Path, model: Path, seed: int) -> Adapter:
    """Make an adapter of every projection of a model."""
    import torch
    from safetensors.torch import load_file, save_file

    draw = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = load_file(model / "model.safetensors")
    factors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in TARGETS:
            down = 0.2 * torch.randn(RANK, weight.shape[1], generator=draw)
            up = 0.2 * torch.randn(weight.shape[0], RANK, generator=draw)
            factors |= {f"base_model.model.{module}.lora_{which}.weight": w for which, w in (("A", down), ("B", up))}
            weights[name] = weight + SCALE * (up @ down)
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "target_modules": TARGETS, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    merged = folder.with_name(f"{folder.name}-merged")
    shutil.copytree(model, merged)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    return Adapter(folder, merged)
