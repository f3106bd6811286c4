"""What SGLang's models of images look for in its build for CPUs."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["before_imports"]


def before_imports() -> None:
    """SGLang's processor of Qwen's images imports Qwen3.5, which looks for these. No model of the tests calls them."""
    operators: Any = torch.ops.sgl_kernel
    operators.fused_qk_gemma_rmsnorm_cpu = _uncalled
    operators.fused_qk_gemma_rmsnorm_with_gate_cpu = _uncalled


def _uncalled(*given: Any, **named: Any) -> Any:
    raise NotImplementedError("this kernel of Qwen3.5 has no stand-in")
