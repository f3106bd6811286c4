"""Stands in for the kernels that SGLang has for no CPU of this kind, in plain torch: one file for each family.

They are kernels only: what SGLang computes from tensors, on cards in Triton or CUDA and on some CPUs in C++. Everything
that decides when a kernel runs, and on which pages and slots, is SGLang's own. The oracle of the tests is transformers,
whose tokens a wrong kernel would not give; where transformers has no such model, one server without disaggregation.
`test_kernels.py` compares the few whose Triton kernel runs on a CPU with that kernel.
"""

from __future__ import annotations

import torch

from .. import events
from . import attention, deepseek_v4, elementwise, hierarchy, images, minimax, pages, pinned, recurrent, speculation

__all__ = ["after_imports", "before_imports"]


def before_imports() -> None:
    """Put what SGLang's modules look for while they are imported, in this process."""
    recurrent.before_imports()
    elementwise.before_imports()
    images.before_imports()


def after_imports() -> None:
    """Put the other kernels where SGLang looks for them, in this process. SGLang is imported."""
    from .. import newest  # it needs the adapter, which does not load in every server that is started with this package

    events.install()
    for family in (attention, elementwise, hierarchy, pages, pinned, recurrent, speculation):
        family.after_imports()
    if not newest.OLDER:
        deepseek_v4.after_imports()
        minimax.after_imports()  # the Triton of the tests refuses a kernel that SGLang 0.5.21 and 0.5.22 have
    torch.compiler.set_stance("force_eager")  # SGLang's plain functions are compiled for each shape otherwise
