"""The reference's process: the same model in one process, with nothing moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelink_demo.engine import reference
from statelink_demo.messages import Ready, Serve, Settings, Solved
from statelink_demo.model import build_model, configure_torch

if TYPE_CHECKING:
    from statelink_demo.processes import Pipe

__all__ = ["run"]


def run(pipe: Pipe, settings: Settings) -> None:
    """Answer prompts until the parent hangs up."""
    configure_torch()
    model = build_model(settings.seed)
    pipe.send(Ready())
    while (work := pipe.receive(Serve)) is not None:
        for request in work.requests:
            pipe.send(Solved(request.room, reference(model, request.prompt, settings.tokens)))
