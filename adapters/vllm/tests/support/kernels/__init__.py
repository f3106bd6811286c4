"""Stand-ins for the kernels that vLLM calls on a CPU for families of models, in plain torch; a file for each family.

`cpu_kernels` beside this has those of dense attention and Mamba2, which every process of an ordinary server loads.
Tests compare two engines with one, and all of them have these kernels: they show that state arrives. The oracle of the
kernels is `transformers`: each token of a family is its best one.
"""

from __future__ import annotations

from typing import Any

from . import convolutions, deepseek_v4, delta, dsa, experts, kda, latents, minimax, scan, speculation

__all__ = ["install"]

FAMILIES = (convolutions, deepseek_v4, delta, dsa, experts, kda, latents, minimax, scan, speculation)

_kept: list[Any] = []
"""Keeps the registrations alive."""


def install() -> None:
    """Register all of them. Called once in a process, after vLLM has loaded its own."""
    import torch

    make: Any = torch.library.Library
    library = make("_C", "FRAGMENT")

    def kernel(signature: str, plain: Any) -> None:
        library.define(signature)
        library.impl(signature.partition("(")[0], plain, "CPU")

    for family in FAMILIES:
        family.define(kernel)
    _kept.append(library)
