"""Pinned memory of the host, which a card reads by itself: without a card it is ordinary memory."""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["after_imports"]


def after_imports() -> None:
    """SGLang's LoRA asks for pinned memory wherever it runs, and torch refuses that without a card."""
    anything: Any = torch
    for name in ("arange", "empty", "tensor", "zeros"):
        setattr(anything, name, _ordinary(getattr(anything, name)))
    anything.Tensor.pin_memory = lambda self, *given: self


def _ordinary(make: Any) -> Any:
    @functools.wraps(make)
    def made(*given: Any, pin_memory: bool = False, **named: Any) -> Any:
        return make(*given, **named)

    return made
