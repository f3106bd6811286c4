"""Mooncake: its import, its environment and its engines. A probe or a link asks for them."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import re
import threading
from typing import TYPE_CHECKING, Any

from statelink.backend.native import environment, lacking

from ._quiet import quiet
from ._settings import Unusable, apply

if TYPE_CHECKING:
    from ._options import Options

__all__ = ["BUILDS", "PACKAGES", "Library", "absent", "forced_tcp", "loads"]

BUILDS = (
    "pip install mooncake-transfer-engine-non-cuda; where memory is CUDA's, mooncake-transfer-engine for CUDA 12, "
    "or mooncake-transfer-engine-cuda13 for CUDA 13; the plugin's README names builds for other machines"
)
"""A hint: every build installs the same module, so exactly one has to be chosen."""
PACKAGES = {
    "libcurl.so.4": "libcurl4",
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "librdmacm.so.1": "librdmacm1",
    "liburing.so.2": "liburing2",
}
"""Shared libraries that builds of Mooncake need from the system, and their Debian packages."""

MEMORY, SYNC = "batch_register_memory batch_unregister_memory", "batch_transfer_sync_write batch_transfer_sync_read"
ASYNC = "batch_transfer_async_write get_batch_transfer_status transfer_submit_write transfer_check_status"
NEEDED = {"TransferEngine": f"initialize get_rpc_port get_local_topology send_probe {MEMORY} {SYNC} {ASYNC}"}

OLDEST = 0, 3, 12
"""The first release whose TCP transport waits for the peer's word that the bytes of a write are in its memory."""
RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)")

_setup = threading.Lock()


class Library:
    """The imported library.

    Attributes:
        distribution: The build that is installed, such as ``mooncake-transfer-engine-non-cuda``.
        version: The build and its version.
    """

    def __init__(self, options: Options) -> None:
        """Import it.

        Raises:
            ImportError: It is not installed, its import failed, this version lacks something, or it cannot use the
                settings in ``options``.
        """
        with _setup:
            apply(options.settings)
            module = importlib.import_module("mooncake.engine")
        lacks = lacking(module, NEEDED)
        if lacks:
            raise Unusable(f"this version of Mooncake has no {', '.join(lacks)}", "install a newer one")
        self._engine: Any = module.TransferEngine
        found = importlib.metadata.packages_distributions().get("mooncake", ())
        self.distribution = found[0] if found else "mooncake"
        version = importlib.metadata.version(found[0]) if found else ""
        self.version = f"{self.distribution} {version}".strip()
        read = RELEASE.match(version)
        if read and tuple(map(int, read.groups())) < OLDEST:
            reason = f"{self.version} reports a write over TCP as done before its bytes are there"
            raise Unusable(reason, "install a newer one, on both sides")

    @property
    def cuda(self) -> bool:
        """Whether this build knows CUDA memory, by its name."""
        return not self.distribution.endswith(("non-cuda", "npu"))

    def engine(self, host: str, options: Options) -> tuple[Any, int]:
        """An engine at ``host``, and its status: 0 if it listens."""
        # Regular builds choose a transport themselves and ignore the protocol.
        forced = {"MC_FORCE_TCP": "1"} if options.protocol == "tcp" else {}
        told = "tcp" if options.protocol == "auto" else options.protocol
        with _setup, environment(forced):
            with quiet():
                engine = self._engine()
                status = engine.initialize(host, "P2PHANDSHAKE", told, options.devices)
            if status != 0:  # again, so that it prints why
                engine = self._engine()
                status = engine.initialize(host, "P2PHANDSHAKE", told, options.devices)
            return engine, status

    def finds_devices(self, engine: Any, options: Options) -> bool:
        """Whether the library itself finds an RDMA device that it may use."""
        topology = json.loads(engine.get_local_topology(options.devices))
        return any(names for groups in topology.values() for names in groups)


def absent(error: Exception) -> tuple[str, str]:
    """Why Mooncake cannot be imported, and what helps."""
    if isinstance(error, Unusable):
        return str(error), error.hint
    if isinstance(error, ModuleNotFoundError) and error.name in ("mooncake", "mooncake.engine"):
        return "Mooncake's TransferEngine is not installed", BUILDS
    reason = f"Mooncake is installed, and its import fails: {error}"
    if "libcuda" in str(error):  # the runtime of one version of CUDA, or NVIDIA's driver
        return reason, f"a build for CUDA needs that version of CUDA, and NVIDIA's driver. Other builds: {BUILDS}"
    missing = [package for library, package in PACKAGES.items() if not loads(library)]
    if missing and "cannot open shared object file" in str(error):
        return reason, f"sudo apt-get install -y {' '.join(missing)}"
    return reason, ""


def forced_tcp() -> bool:
    """Whether the environment makes every engine of this process use TCP."""
    return "MC_FORCE_TCP" in os.environ


def loads(library: str) -> bool:
    """Whether the loader finds a shared library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
