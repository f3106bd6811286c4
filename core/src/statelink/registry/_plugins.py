"""Loads packages with hooks: strategies, state types, observers."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import pluggy

from statelink.backend import _hooks
from statelink.state import register_state_type

from ._backends import entry_points

if TYPE_CHECKING:
    import importlib.metadata

__all__ = ["GROUP", "PluginFailure", "plugin_failures", "plugin_manager"]

GROUP = "statelink.plugins"

log = logging.getLogger("statelink.registry")


class PluginFailure(NamedTuple):
    """A hook package that could not be loaded. The others work without it.

    Attributes:
        name: Name of its entry point.
        distribution: Name of its package.
        reason: The exception that it raised.
    """

    name: str
    distribution: str
    reason: str


_lock = threading.Lock()
_manager: pluggy.PluginManager | None = None
_failures: list[PluginFailure] = []


def plugin_manager() -> pluggy.PluginManager:
    """The process's plugin manager, with every hook package loaded and its state types registered.

    Packages are loaded once, one by one. A failure is recorded and logged, and stops no other package. With
    ``STATELINK_STRICT_PLUGINS=1`` it is raised.
    """
    global _manager
    with _lock:
        if _manager is None:
            manager = pluggy.PluginManager("statelink")
            manager.add_hookspecs(_hooks)
            if os.environ.get("STATELINK_TRACE_PLUGINS") == "1":
                manager.trace.root.setwriter(lambda text: log.info("%s", text.rstrip()))
                manager.enable_tracing()
            for point, distribution, _ in sorted(entry_points(GROUP), key=lambda each: (each[0].name, each[1])):
                _load(manager, point, distribution)
            _manager = manager
        return _manager


def plugin_failures() -> tuple[PluginFailure, ...]:
    """Hook packages that failed to load."""
    return tuple(_failures)


def _load(manager: pluggy.PluginManager, point: importlib.metadata.EntryPoint, distribution: str) -> None:
    if manager.has_plugin(point.name):
        return
    try:
        plugin = point.load()
        manager.register(plugin, name=point.name)
        manager.check_pending()
        for hook in manager.hook.statelink_state_types.get_hookimpls():
            if hook.plugin is plugin:
                brought: Any = hook.function()
                for state_type in brought:
                    register_state_type(state_type)
    except (Exception, SystemExit) as error:
        if manager.has_plugin(point.name):
            manager.unregister(name=point.name)
        if os.environ.get("STATELINK_STRICT_PLUGINS") == "1":
            raise
        failure = PluginFailure(point.name, distribution, f"{type(error).__name__}: {error}")
        _failures.append(failure)
        log.warning("plugin %s (%s) failed to load: %s", *failure)
