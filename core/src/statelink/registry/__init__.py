"""Finding plugins and picking one backend by name.

Listing reads package metadata and imports nothing. Only the backend that is picked is imported.
"""

from __future__ import annotations

from ._backends import Listed, entry_points, is_known, list_backends, load_backend
from ._plugins import PluginFailure, plugin_failures, plugin_manager

__all__ = [
    "Listed",
    "PluginFailure",
    "entry_points",
    "is_known",
    "list_backends",
    "load_backend",
    "plugin_failures",
    "plugin_manager",
]
