"""Process-wide settings under which every process of the demo computes the same bits."""

from __future__ import annotations

import logging

import torch
from transformers.utils import logging as transformers_logging

__all__ = ["configure_torch"]


def configure_torch(threads: int = 1) -> None:
    """Fix the thread count and the algorithms, so that equal calls give equal bits in every process.

    Args:
        threads: Threads that one torch operation may use; all processes of one comparison must agree.
    """
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # Silences the notice that the pure-torch kernels are in use: here they are the point.
    transformers_logging.set_verbosity(logging.ERROR)
