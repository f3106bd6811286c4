"""The reference's process: the same model, nothing moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelink_demo.messages import Ready, Solve, Start, answered
from statelink_demo.model import build_model
from statelink_demo.reference import reference
from statelink_demo.runtime import configure_torch

if TYPE_CHECKING:
    from statelink_demo.control import Control

__all__ = ["run"]


def run(control: Control, start: Start) -> None:
    """Answer prompts until the parent hangs up."""
    configure_torch()
    model = build_model(start.seed)
    control.send(Ready())
    while (command := control.receive(Solve)) is not None:
        for request in command.requests:
            if control.closed:
                return
            found = reference(model, request.prompt, chunk_tokens=start.chunk_tokens, count=command.count)
            control.send(answered(request.room, found))
