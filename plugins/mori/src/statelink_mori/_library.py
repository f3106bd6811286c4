"""MoRI: its import, and its engines with their registered memory."""

from __future__ import annotations

import importlib
import ipaddress
import re
import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from statelink.backend.native import check_pinnable, lacking, torch_place, unregistered
from statelink.errors import BackendUnavailableError

from ._machine import active_ports

if TYPE_CHECKING:
    from statelink.backend import Region

    from ._options import Options

__all__ = ["Engine", "Library"]

XGMI_ALONE = 1
"""The port of an engine that should use RDMA and does not."""
MEMORY, REMOTE = "register_memory deregister_memory", "register_remote_engine deregister_remote_engine"
NEEDED = {
    "IOEngine": f"create_backend get_engine_desc {MEMORY} {REMOTE} create_session",
    "IOEngineSession": "allocate_transfer_uid batch_write",
    "IOEngineConfig": "host port",
    "RdmaBackendConfig": "enable_notification",
    "BackendType": "RDMA XGMI",
    "EngineDesc": "pack unpack key node_id host port",
    "MemoryDesc": "pack unpack engine_key data size loc device_id numa_node",
    "MemoryLocationType": "CPU GPU",
}
"""Every name of ``mori.io`` that this plugin uses, but for ``IOEngine.pop_peer_failure``, which came with 1.2.4."""


OLDEST = [1, 2, 2]
"""The oldest release that is taken. A build without a version is judged by its names alone."""
WORSE = "waits for ever for a peer that is stopped, and ends this process where a peer lacks a memory"


class Library:
    """The imported library.

    Attributes:
        io: ``mori.io``.
        version: Its version, which may be ``unknown``.
    """

    def __init__(self) -> None:
        """Import it.

        Raises:
            ImportError: It is not installed, its import failed, or this version lacks what is needed.
        """
        self.version = f"mori {getattr(importlib.import_module('mori'), '__version__', 'unknown')}"
        numbers = [int(each) for each in re.findall(r"\d+", self.version)]
        if numbers and numbers < OLDEST:
            raise ImportError(f"this is {self.version}, which {WORSE}; this plugin needs amd-mori 1.2.2")
        self.io: Any = importlib.import_module("mori.io")
        lacks = lacking(self.io, NEEDED)
        if lacks:
            raise ImportError(f"this version of mori.io has no {', '.join(lacks)}; this plugin needs amd-mori 1.2.2")

    def config(self, transport: str, parameters: dict[str, Any]) -> tuple[Any, Any]:
        """The library's name for a transport, and its configuration."""
        kind = getattr(self.io, f"{transport.capitalize()}BackendConfig")
        fixed = {"enable_notification": False} if transport == "RDMA" else {}  # completions use another connection
        return getattr(self.io.BackendType, transport), kind(**parameters, **fixed)

    def place(self, region: Region) -> tuple[Any, int]:
        """The library's kind of memory, and the device, of a region.

        Raises:
            TransferError: The library has no such kind.
        """
        kind, device = torch_place(region, "MoRI", backend="mori")
        location = self.io.MemoryLocationType
        return (location.CPU, -1) if kind == "dram" else (location.GPU, device)


class Engine:
    """One engine of the library.

    The key must be new in every process, because a peer's network card remembers a key longer than its process lives.

    Attributes:
        io: The library's engine.
        desc: Its descriptor.
        memories: The descriptor of each memory, in the order of the region table.

    Raises:
        BackendUnavailableError: The library refuses to start, or the port is taken.
    """

    def __init__(self, library: Library, key: str, host: str, options: Options, port: int) -> None:
        self._library = library
        self._host_memory = options.backends.keys() != {"XGMI"}
        self._pins = "RDMA" in options.backends
        self.memories: list[Any] = []
        try:
            # The library accepts anything else as an address, too, and sends it to peers.
            if ipaddress.IPv4Address(host).is_unspecified:
                raise ValueError(f"peers cannot reach {host}")
            if port:
                with socket.socket() as free:
                    free.bind((host, port))  # the library ends the process if the port is taken
            configs = [library.config(name, parameters) for name, parameters in options.backends.items()]
            self.io: Any = library.io.IOEngine(key, library.io.IOEngineConfig(host=host, port=port))
            for kind, config in configs:
                self.io.create_backend(kind, config)
            self.desc: Any = self.io.get_engine_desc()
            if self.desc.port == XGMI_ALONE and "RDMA" in options.backends:
                raise RuntimeError("no RDMA port is active, and MORI_DISABLE_AUTO_XGMI=0 makes it use XGMI alone")
        except (RuntimeError, ValueError, TypeError, AttributeError, OSError) as error:
            raise BackendUnavailableError(
                "MoRI's engine could not be started",
                cause=" ".join(f"{type(error).__name__}: {error}".split()),  # an unknown parameter takes several lines
                hint="see `backends` and `port` in the options, and MORI_* in the environment; it speaks IPv4 only",
                backend="mori",
                library=library.version,
                host=host,
            ) from error

    def register(self, regions: Sequence[Region]) -> None:
        """Register all regions.

        Raises:
            TransferError: A region is refused. The error names it.
        """
        # Without an RDMA port nothing is pinned, as with the stand-in for the library.
        if self._pins and active_ports():
            check_pinnable(regions, backend="mori", library=self._library.version)
        while self.memories:  # remove an earlier registration, which may have failed
            self.io.deregister_memory(self.memories.pop())
        for index, region in enumerate(regions):
            location, device = self._library.place(region)
            try:
                if device < 0 and not self._host_memory:
                    raise RuntimeError("XGMI moves memory of GPUs only")
                self.memories.append(self.io.register_memory(region.address, region.nbytes, device, location))
            except (RuntimeError, TypeError) as error:
                raise unregistered(index, region, error, backend="mori", library=self._library.version) from error

    def failures(self) -> Iterator[tuple[str, str]]:
        """What the library noticed since the last call: the key of a remote engine, or an empty text, and what it says.

        Nothing, if this version of the library does not tell.
        """
        pop = getattr(self.io, "pop_peer_failure", lambda: None)
        while (failure := pop()) is not None:
            yield failure.remote_engine_key, f"{failure.reason.name}: {failure.detail}"

    def close(self) -> None:
        """Destroy the engine, which joins its threads.

        Its sessions must be freed before, because they point into it.
        """
        self.io = None
