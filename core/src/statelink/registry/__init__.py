"""Finds plugins, and loads backends and other classes by name.

Listing backends reads package metadata and imports nothing. Only the backend that is loaded is imported.
"""

from __future__ import annotations

from ._backends import (
    Listed,
    conflict_hint,
    entry_points,
    hidden_backends,
    known_packages,
    list_backends,
    load_backend,
    missing_hint,
    probed,
)
from ._named import load_named
from ._plugins import plugin_failures, plugin_manager

__all__ = [
    "Listed",
    "conflict_hint",
    "entry_points",
    "hidden_backends",
    "known_packages",
    "list_backends",
    "load_backend",
    "load_named",
    "missing_hint",
    "plugin_failures",
    "plugin_manager",
    "probed",
]
