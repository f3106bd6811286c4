"""NIXL itself: its import, its environment and its agents, when a probe or a link asks for them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ._options import Options

__all__ = ["SCRATCH", "Library", "rdma_devices"]

SCRATCH = np.zeros(4096, np.uint8)
"""Where peers write their first bytes. Never freed: a late write must not land in anybody's memory."""

_setup = threading.Lock()
_pacing = threading.Lock()


class Library:
    """The imported library.

    Attributes:
        version: Distribution and version of the build that was chosen, such as ``nixl-cu13 1.5.1``.
        errors: Its exception classes. They derive from ``Exception`` directly, not from ``RuntimeError``.
        disconnected: The one among them that says that a peer is gone.
    """

    def __init__(self) -> None:
        """Import it.

        Raises:
            ImportError: It is not installed, or its import failed.
        """
        with _setup:
            _prepare_environment()
            raising = logging.raiseExceptions
            try:
                importlib.import_module("nixl")
                self._api: Any = importlib.import_module("nixl._api")
            finally:
                logging.raiseExceptions = raising  # importing NIXL turns it off for the whole process
        bindings = self._api.nixlBind
        self.version = _version(self._api.__name__)
        self.errors: tuple[type[Exception], ...] = tuple(
            kind for kind in vars(bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)
        )
        self.disconnected: type[Exception] = bindings.nixlRemoteDisconnectError

    def plugins(self) -> list[str]:
        """Names of the NIXL backends that this build can create."""
        return list(self._agent("statelink-probe").plugin_list)

    def agent(self, name: str, options: Options) -> Any:
        """An agent with its backends created: devices are open and the progress thread runs."""
        settings = {f"UCX_{key}": value for key, value in options.ucx.items()}
        with _setup, _environment(settings):
            agent = self._agent(name, options.progress_interval_us)
            for backend, parameters in options.backends.items():
                agent.create_backend(backend, dict(parameters))
            return agent

    def _agent(self, name: str, interval: int = 0) -> Any:
        # NIXL's default is no lock at all, and two threads then hang in it.
        strict = self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        # The progress thread stays on: over TCP it is what receives a peer's bytes while nobody here polls.
        config = self._api.nixl_agent_config(enable_prog_thread=True, backends=[], sync_mode=strict)
        with _paced(self._api.nixlBind, interval):
            return self._api.nixl_agent(name, config)


@contextlib.contextmanager
def _paced(bindings: Any, interval: int) -> Iterator[None]:
    """Let an agent that is made meanwhile rest ``interval`` microseconds between two rounds of its progress thread.

    The Python API sets 0, which keeps a core busy for as long as the agent lives, and has no parameter for it.
    """
    real = bindings.nixlAgentConfig

    class Paced(real):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, interval if name == "pthrDelay" else value)

    with _pacing:
        bindings.nixlAgentConfig = Paced
        try:
            yield
        finally:
            bindings.nixlAgentConfig = real


def rdma_devices() -> list[str]:
    """Names of the RDMA devices of this host, whatever the state of their ports."""
    root = Path("/sys/class/infiniband")
    return sorted(device.name for device in root.iterdir()) if root.is_dir() else []


def _prepare_environment() -> None:
    """Set what NIXL reads once, when it is loaded, and the user has not set."""
    # Its INFO lines go to stdout, and it prints every error that it also raises.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    if not rdma_devices():
        # UCX's ib module brings a bundled libnl whose destructor crashes the process at exit (NIXL 1.5.1).
        os.environ.setdefault("UCX_MODULES", "^ib")


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while; the caller holds the lock."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _version(module: str) -> str:
    """``nixl`` is a front for one of several builds; the module's package tells which."""
    distribution = module.partition(".")[0].replace("_", "-")
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{distribution} of unknown version"
