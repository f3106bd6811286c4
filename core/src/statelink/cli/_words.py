"""Amounts, times and counts as a few words, for tables and their heads."""

from __future__ import annotations

__all__ = ["counted", "duration", "size"]


def counted(number: int, word: str) -> str:
    """So many things, such as ``1 link`` or ``2 links``."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def size(nbytes: float) -> str:
    """A number of bytes, such as ``12 B`` or ``1.5 MiB``."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{nbytes:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"


def duration(seconds: float | None) -> str:
    """A time, such as ``3 us``, ``1.5 s`` or ``2.0 h``; ``-`` for none."""
    if seconds is None:
        return "-"
    for most, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (100.0, 1.0, "s"), (6000.0, 1 / 60, "min")):
        if seconds < most:
            return f"{seconds * factor:.{0 if unit == 'us' else 1}f} {unit}"
    return f"{seconds / 3600:.1f} h"
