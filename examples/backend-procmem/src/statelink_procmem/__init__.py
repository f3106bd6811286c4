"""Statelink backend ``procmem``."""

from __future__ import annotations

from ._backend import Options, ProcmemBackend

__all__ = ["Options", "ProcmemBackend"]
