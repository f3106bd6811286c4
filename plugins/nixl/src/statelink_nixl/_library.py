"""NIXL: its import, its environment and its agents. A probe or a link asks for them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from statelink.backend import logger
from statelink.backend.native import environment, lacking, rdma_devices

from ._loading import loading_error
from ._transport import with_cuda

if TYPE_CHECKING:
    from ._options import Options

__all__ = ["SCRATCH", "Library"]

log = logger("statelink.nixl")

THREADED = ("UCX", "LIBFABRIC")
"""NIXL's backends that have the parameter ``num_threads``."""
SPLIT = 128
"""Fewest blocks of a part of a transfer that NIXL gives a thread. With its own number, 1024, the second thread has none
of a batch of less than 2048 blocks, and the core gives out smaller ones, so that requests take turns."""
STORES = frozenset({"AZURE_BLOB", "GDS", "GDS_MT", "GUSLI", "HF3FS", "INFINIA", "OBJ", "POSIX"})
"""NIXL's backends for files and object stores. They reach no other process."""

AGENT = "create_backend register_memory get_agent_metadata add_remote_agent remove_remote_agent"
NEEDED = {
    "nixl_agent": f"{AGENT} get_xfer_descs initialize_xfer transfer check_xfer_state",
    "nixl_agent_config": "__init__",
    "nixl_thread_sync_t": "NIXL_THREAD_SYNC_STRICT",
    "nixlBind": "nixlAgentConfig nixlRemoteDisconnectError",
}

NOT_FOUND = "cannot open shared object file"
"""What the loader says of a library that is not there."""

DEFAULTS = {"UCX_RESOLVE_REMOTE_EP_ID": "off", "UCX_TCP_CONN_NB": "y"}
"""Settings of UCX that its links get, unless the environment has others.

The first is whether UCX asks the other side for the number of its endpoint before it sends anything. If it does, the
other side makes an endpoint, too. UCX destroys neither as long as both processes live, and NIXL does not force it to.
So each remote agent that is removed leaves its sockets. UCX 1.23, of NIXL 1.5, asks by default.

With the second, UCX does not wait for one connection over TCP before it begins the next.
"""

SCRATCH = np.zeros(4096, np.uint8)
"""Memory for the first bytes from peers. It is never freed, so that a late write does not land in other memory."""

_setup = threading.Lock()
_pacing = threading.Lock()


class Library:
    """The imported library.

    Attributes:
        version: Distribution and version of the build that was chosen, such as ``nixl-cu13 1.5.1``.
        errors: Its exception classes, which derive directly from ``Exception``, and those of its Python part.
        disconnected: The exception class that says that a peer is gone.
    """

    def __init__(self) -> None:
        """Import it.

        Raises:
            ImportError: It is not installed, its import failed, or this version lacks what is needed.
        """
        with _setup:
            _prepare_environment()
            raising = logging.raiseExceptions
            try:
                with _torch_left_out():
                    importlib.import_module("nixl")
                self._api: Any = importlib.import_module("nixl._api")
            finally:
                logging.raiseExceptions = raising  # importing NIXL turns this off for the whole process
        lacks = lacking(self._api, NEEDED)
        if lacks:
            raise ImportError(f"this version of nixl has no {', '.join(lacks)}")
        bindings = self._api.nixlBind
        self.version = _version(self._api.__name__)
        native = (kind for kind in vars(bindings).values() if isinstance(kind, type) and issubclass(kind, Exception))
        self.errors: tuple[type[Exception], ...] = (RuntimeError, *native)
        self.disconnected: type[Exception] = bindings.nixlRemoteDisconnectError

    def plugins(self) -> list[str]:
        """Names of the NIXL backends that this build can create."""
        return list(self._agent("statelink-probe").plugin_list)

    def lacks(self, options: Options) -> tuple[str, str]:
        """Why this build cannot use the backends in ``options``, and a hint; empty if it can."""
        plugins = self.plugins()
        missing = [name for name in options.backends if name not in plugins]
        if missing:
            return f"{self.version} has no backend {', '.join(missing)}", f"its backends are {', '.join(plugins)}"
        if not options.backends.keys() - STORES:
            what = f"NIXL's {', '.join(options.backends)} moves bytes to files or object stores, not to another process"
            return what, "add UCX, or another that reaches a process, to `backends`"
        for name in options.backends:
            # Some need libraries that are not in the wheel, or files of the wheel are missing.
            cause = self._unloadable(name)
            if cause:
                usable = ", ".join(other for other in plugins if other not in STORES and not self._unloadable(other))
                able = f"of those that reach another process, {usable or 'none'} can be loaded"
                hint = f"install what it needs, or NIXL again; {able}"
                return f"{self.version} has a backend {name}, which cannot be loaded: {cause}", hint
        return "", ""

    def _unloadable(self, plugin: str) -> str:
        """The loader's error for a plugin of this wheel; nothing if it loads, or is not in the wheel."""
        package = Path(self._api.__file__).parent
        path = package.with_name(f"{package.name}.libs") / "nixl" / f"libplugin_{plugin}.so"
        if "NIXL_PLUGIN_DIR" in os.environ or not path.exists():
            return ""
        if plugin != "UCX":
            return loading_error(path)
        # UCX reads its global settings when it is loaded, so in this process the first link has to load it. It needs
        # what the bindings bring.
        bindings = getattr(self._api.nixlBind, "__file__", None)
        return loading_error(path, after=bindings) if bindings else ""

    def lacks_cuda(self) -> str:
        """The libraries that UCX's modules for CUDA need and the loader does not find; empty if none, or not known."""
        package, bindings = Path(self._api.__file__).parent, getattr(self._api.nixlBind, "__file__", None)
        modules = sorted((package.with_name(f"{package.name}.libs") / "ucx").glob("libuc[mt]_cuda.so*"))
        causes = [loading_error(path, after=bindings) for path in modules] if bindings else []
        # Other errors come from loading a module without the rest of UCX.
        return "; ".join(dict.fromkeys(cause for cause in causes if NOT_FOUND in cause))

    def agent(self, name: str, options: Options) -> Any:
        """An agent with its backends. Devices are open, and the progress thread runs."""
        settings = {name: value for name, value in DEFAULTS.items() if name not in os.environ}
        settings.update({f"UCX_{key}": value for key, value in options.ucx.items()})
        if options.devices:
            settings["UCX_NET_DEVICES"] = ",".join(options.devices)
        added = with_cuda(options)
        if added:
            settings["UCX_TLS"] = added
            log.info("this host has a graphics card of NVIDIA, where NIXL needs cuda_copy: UCX_TLS=%s", added)
        with _setup, environment(settings):
            agent = self._agent(name, options.progress_interval_us, options.sync_mode)
            for backend, parameters in options.backends.items():
                shared: dict[str, str] = {}
                if backend in THREADED and options.num_threads:
                    shared = {"num_threads": str(options.num_threads), "split_batch_size": str(SPLIT)}
                agent.create_backend(backend, {**shared, **parameters})
            return agent

    def _agent(self, name: str, interval: int = 0, mode: str = "strict") -> Any:
        # NIXL's default is to use no lock. Two threads then hang in it.
        sync = self._api.nixl_thread_sync_t[f"NIXL_THREAD_SYNC_{mode.upper()}"]
        # The progress thread stays on, because over TCP it receives a peer's bytes while nobody here polls.
        config = self._api.nixl_agent_config(enable_prog_thread=True, backends=[], sync_mode=sync)
        with _paced(self._api.nixlBind, interval):
            return self._api.nixl_agent(name, config)


@contextlib.contextmanager
def _paced(bindings: Any, interval: int) -> Iterator[None]:
    """Inside, a new agent's progress thread rests ``interval`` microseconds between two rounds.

    The Python API sets 0, which keeps a core busy as long as the agent lives, and has no parameter for it.
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


def _prepare_environment() -> None:
    """Set variables that NIXL reads once, when it is loaded, unless the user has set them."""
    # It writes INFO lines to standard output, and prints every error that it also raises.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    if not rdma_devices():
        # UCX needs its ib module only for RDMA. The module contains a libnl whose destructor crashes the process at
        # exit (NIXL 1.5.1). So without RDMA devices, UCX is told to leave it out.
        os.environ.setdefault("UCX_MODULES", "^ib")


@contextlib.contextmanager
def _torch_left_out() -> Iterator[None]:
    """Keep NIXL's front from importing torch, if torch's files already show that it was built without CUDA.

    The front asks torch in order to choose the build of NIXL for the same CUDA. The import takes seconds, and nothing
    here needs it.
    """
    try:
        front: Any = importlib.import_module("nixl_meta_utils")
        real, on_disk = front.detect_cuda_major, front._torch_cuda_version_from_disk
    except (ImportError, AttributeError):  # this front finds its build in another way
        yield
        return

    def detect() -> int | None:
        found: int | None = real() if {"torch", "cuda.bindings", "cupy"} & sys.modules.keys() or on_disk() else None
        return found

    front.detect_cuda_major = detect
    try:
        yield
    finally:
        front.detect_cuda_major = real


def _version(module: str) -> str:
    """Distribution and version. ``nixl`` is a front for one of several builds; the module's package shows which."""
    distribution = module.partition(".")[0].replace("_", "-")
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{distribution} of unknown version"
