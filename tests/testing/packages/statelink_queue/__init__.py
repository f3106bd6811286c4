"""A backend over a library that is imported late, and that reports later."""

from __future__ import annotations

from ._backend import Options, QueueBackend

__all__ = ["Options", "QueueBackend"]
