"""``statelink top``: what running links move, from one look to the next."""

from __future__ import annotations

from .._snapshots import Answers, answers
from ._command import top
from ._looks import Looks

__all__ = ["Answers", "Looks", "answers", "top"]
