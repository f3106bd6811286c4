"""Amounts and times as words of a few characters, for tables."""

from __future__ import annotations

__all__ = ["duration", "size"]


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
