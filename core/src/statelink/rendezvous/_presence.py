"""How many ranks of an instance are registered, in words that both directories use."""

from __future__ import annotations

__all__ = ["presence"]


def presence(present: int, ranks: int) -> str:
    """A clause that ``registered ...`` continues.

    Args:
        present: Number of ranks that are registered.
        ranks: Number of ranks of the instance; 0 if none is registered.
    """
    return f"{present} of its {ranks} ranks are" if ranks else "nobody of this name is"
