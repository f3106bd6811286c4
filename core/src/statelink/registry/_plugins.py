"""Loads packages with hooks: strategies, state types, observers."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
import threading
from collections import Counter
from typing import Any, NamedTuple

import pluggy

from statelink._logs import logger
from statelink.backend import _hooks
from statelink.errors import ConfigError
from statelink.state import register_state_type

from ._backends import entry_points

__all__ = ["GROUP", "PluginFailure", "plugin_failures", "plugin_manager"]

GROUP = "statelink.plugins"
LOADING_SECONDS = 60.0
"""Seconds for which a thread waits for a package that another thread loads."""

log = logger("statelink.registry")


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


class _Package:
    """An entry point for hooks, and how far it is loaded.

    Attributes:
        point: The entry point.
        distribution: Name of its package.
        name: Its name in the plugin manager.
        loaded: Whether it was loaded, or has failed.
        thread: The thread that loads it; ``None`` if none does.
    """

    def __init__(self, point: importlib.metadata.EntryPoint, distribution: str, name: str) -> None:
        self.point = point
        self.distribution = distribution
        self.name = name
        self.loaded = False
        self.thread: int | None = None


_changed = threading.Condition()
"""Guards what follows. No thread holds it while code of a package runs: that may ask for state types or open a link,
also in a thread of its own."""
_manager: pluggy.PluginManager | None = None
_packages: list[_Package] = []
_failures: list[PluginFailure] = []


def plugin_manager() -> pluggy.PluginManager:
    """The process's plugin manager, with every hook package loaded and its state types registered.

    Packages are loaded once, one by one. A failure is recorded and logged, and stops no other package. With
    ``STATELINK_STRICT_PLUGINS=1`` it is raised. Several packages may use one name: then each is registered under its
    name and its package's.

    Any thread; blocks while packages are imported. A package that calls this while it is imported, or while its state
    types are asked for, gets the manager with the packages that were loaded before it.

    Raises:
        ConfigError: Another thread has been loading a package for a minute, and has not ended (``config.plugins``).
    """
    manager = _made()
    me = threading.get_ident()
    if not any(package.thread == me for package in _packages):
        for package in _packages:
            if not package.loaded:
                _load(manager, package, me)
    return manager


def plugin_failures() -> tuple[PluginFailure, ...]:
    """Hook packages that failed to load."""
    return tuple(_failures)


def _made() -> pluggy.PluginManager:
    """The manager; the first call finds the packages, and imports none."""
    global _manager, _packages
    if _manager is None:
        manager = pluggy.PluginManager("statelink")
        manager.add_hookspecs(_hooks)
        if os.environ.get("STATELINK_TRACE_PLUGINS") == "1":
            manager.trace.root.setwriter(lambda text: log.info("%s", text.rstrip()))
            manager.enable_tracing()
        points = sorted({(point.name, name, point.value): point for point, name, _ in entry_points(GROUP)}.items())
        uses = Counter(name for (name, _, _), _ in points)
        packages = [
            _Package(point, distribution, name if uses[name] == 1 else f"{name} of {distribution}")
            for (name, distribution, _), point in points
        ]
        with _changed:
            if _manager is None:  # no other thread was faster
                _packages, _manager = packages, manager
    return _manager


def _load(manager: pluggy.PluginManager, package: _Package, me: int) -> None:
    """Load a package, or wait until another thread has loaded it."""
    if package.thread is None and _is_being_imported(package):
        # Somebody imports the module by its own name. If it is another thread, this waits for its end. Nobody else
        # waits for this thread meanwhile, so that the module may ask for state types.
        with contextlib.suppress(Exception, SystemExit):  # the import below raises it again
            importlib.import_module(package.point.module)
        if _is_being_imported(package):
            return  # this thread imports it, and has not come to its hooks: the next call loads them
    with _changed:
        if not _changed.wait_for(lambda: package.thread is None, LOADING_SECONDS):
            raise ConfigError(
                f"the package {package.distribution} with hooks is not loaded",
                cause=f"another thread has imported {package.point.module} for {LOADING_SECONDS:.0f} s, and has "
                "not ended",
                hint="a module must not wait, while it is imported, for a thread that asks for a state type or opens a "
                "link",
                code="config.plugins",
            )
        if package.loaded:
            return
        package.thread = me
    try:
        _register(manager, package)
        package.loaded = True
    finally:
        with _changed:
            package.thread = None
            _changed.notify_all()


def _register(manager: pluggy.PluginManager, package: _Package) -> None:
    registered = False
    try:
        plugin = package.point.load()
        with _changed:  # the manager's lists; no code of the package runs
            manager.register(plugin, name=package.name)
            registered = True
            manager.check_pending()
        for hook in manager.hook.statelink_state_types.get_hookimpls():
            if hook.plugin is plugin:
                brought: Any = hook.function()
                for state_type in brought:
                    register_state_type(state_type)
    except BaseException as error:
        if registered:
            with _changed:
                manager.unregister(name=package.name)
        wrong = isinstance(error, Exception | SystemExit)  # others, as of an interrupt, are nobody's failure
        if not wrong or os.environ.get("STATELINK_STRICT_PLUGINS") == "1":
            raise
        failure = PluginFailure(package.point.name, package.distribution, f"{type(error).__name__}: {error}")
        _failures.append(failure)
        log.warning("plugin %s (%s) failed to load: %s", *failure)


def _is_being_imported(package: _Package) -> bool:
    """Whether the import of its module, or of a package around it, has begun and has not ended. In any thread."""
    parts = package.point.module.split(".")
    for count in range(1, len(parts) + 1):
        spec = getattr(sys.modules.get(".".join(parts[:count])), "__spec__", None)
        if getattr(spec, "_initializing", False):  # what the import system itself looks at
            return True
    return False
