"""Hints for names that were nearly right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(given: object, known: Iterable[str], otherwise: str = "") -> str:
    """A hint that names the nearest of the ``known`` names, or ``otherwise`` if none is near."""
    close = difflib.get_close_matches(str(given), list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise
