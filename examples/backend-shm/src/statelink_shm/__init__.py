"""Statelink backend ``shm``."""

from __future__ import annotations

from ._backend import Options, ShmBackend

__all__ = ["Options", "ShmBackend"]
