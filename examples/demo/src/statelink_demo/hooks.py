"""Being told, during a forward pass, that a decoder layer is done."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from transformers import Qwen3NextForCausalLM

__all__ = ["after_each_layer"]


@contextmanager
def after_each_layer(model: Qwen3NextForCausalLM, done: Callable[[int], None]) -> Iterator[None]:
    """Call `done(layer)` right after each decoder layer of every forward pass inside the context."""
    with ExitStack() as stack:
        for layer, module in enumerate(model.model.layers):

            def hook(_module: torch.nn.Module, _args: object, _output: object, layer: int = layer) -> None:
                done(layer)

            stack.callback(module.register_forward_hook(hook).remove)
        yield
