"""Dynamo's worker for SGLang, which is started with this script instead of ``python -m dynamo.sglang``.

Dynamo imports SGLang's processor of images of Qwen-VL, whatever the model. On a CPU, that module names kernels of
``sgl_kernel``, of which there is no build here. Nothing calls them with a model without images.
"""

from __future__ import annotations

from typing import Any

KERNELS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_input_proj_cpu",
)

if __name__ == "__main__":
    import torch

    library: Any = torch.library
    kernels = library.Library("sgl_kernel", "FRAGMENT")
    for kernel in KERNELS:
        kernels.define(f"{kernel}(Tensor x) -> Tensor")

    from dynamo.sglang.main import main

    main()
