"""Engines and sessions."""

from __future__ import annotations

import itertools
import os
import socket
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _host
from ._configs import BackendType, IOEngineConfig, MemoryLocationType, RdmaBackendConfig, XgmiBackendConfig
from ._descs import EngineDesc, MemoryDesc, made
from ._memory import Table
from ._onesided import PeerFailureEvent, Rdma, Xgmi

if TYPE_CHECKING:
    from ._host import U64
    from ._status import TransferStatus


UNFIT = "incompatible function arguments. The following argument types are supported:"


class Core:
    """The C++ side of an engine."""

    def __init__(self, key: str, config: IOEngineConfig) -> None:
        self.key, self.config = key, config
        self.running = True
        self.table = Table()
        self.backends: dict[BackendType, Any] = {}
        self.numbers, self.uids = itertools.count(), itertools.count()
        self.node = os.environ.get("MORI_NODE_ID") or socket.gethostname()

    def select(self, local: MemoryDesc, remote: MemoryDesc) -> Any:
        """XGMI if it can, else RDMA if it knows the engine."""
        xgmi = self.backends.get(BackendType.XGMI)
        if xgmi is not None and Xgmi.can(local, remote, xgmi.remotes.get(remote.engine_key), self.node):
            return xgmi
        rdma = self.backends.get(BackendType.RDMA)
        if rdma is not None and remote.engine_key in rdma.remotes:
            return rdma
        return None

    def wait(self) -> None:
        """Until the bytes of an operation may move, or the engine is destroyed."""
        time.sleep(_host.delay())
        while _host.held() and self.running:
            time.sleep(0.001)

    def close(self) -> None:
        self.running = False
        self.table.end()
        for backend in self.backends.values():
            backend.close()


class IOEngine:
    """What the library calls an engine; everything moves through its sessions."""

    def __init__(self, key: str, config: IOEngineConfig) -> None:
        if not isinstance(key, str) or not isinstance(config, IOEngineConfig):
            raise TypeError("IOEngine(): incompatible constructor arguments")
        self._core = Core(key, IOEngineConfig(config.host, config.port))

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None:
            core.close()

    def create_backend(self, type: BackendType, config: Any = None) -> None:
        """Open devices, ports and threads; a second one of a type changes nothing.

        Raises:
            RuntimeError: It cannot be opened, in those cases that do not end the process.
            NotImplementedError: This build has no such transport.
        """
        core = self._core
        if type in core.backends:
            return
        auto = os.environ.get("MORI_DISABLE_AUTO_XGMI", "").startswith("0")
        if type is BackendType.RDMA:
            if not (auto and _host.active_ports() < 1):
                if config is not None and not isinstance(config, RdmaBackendConfig):
                    raise TypeError(f"CreateBackend(): {UNFIT}")
                core.backends[type] = Rdma(core, config)
            else:
                if _host.gpus() < 2:
                    said = "no active RDMA device and no usable GPU P2P; cannot create any backend"
                    raise RuntimeError(said)
                core.config.port = 1
            if auto and _host.gpus() > 1:
                core.backends.setdefault(BackendType.XGMI, Xgmi(core))
        elif type is BackendType.XGMI:
            core.backends[type] = Xgmi(core)
        elif type is BackendType.FABRIC:
            return  # its memory cannot be had here
        elif config is None:
            raise NotImplementedError("backend not implemented yet")
        elif not isinstance(config, RdmaBackendConfig | XgmiBackendConfig):
            raise TypeError(f"CreateBackend(): {UNFIT}")
        else:
            _host.abort('Assertion `false && "not implemented"\' failed')

    def get_engine_desc(self) -> EngineDesc:
        core = self._core
        host, port = core.config.host, core.config.port
        return made(EngineDesc, core.key, core.node, socket.gethostname(), host, port, os.getpid())

    def register_remote_engine(self, desc: EngineDesc) -> None:
        if not isinstance(desc, EngineDesc):
            raise TypeError("register_remote_engine(): incompatible function arguments")
        for backend in self._core.backends.values():
            backend.remotes[desc.key] = desc

    def deregister_remote_engine(self, desc: EngineDesc) -> None:
        for backend in self._core.backends.values():
            backend.remotes.pop(desc.key, None)

    def register_memory(self, ptr: int, size: int, device_id: int, mem_loc: MemoryLocationType) -> MemoryDesc:
        if not isinstance(mem_loc, MemoryLocationType) or min(ptr, size) < 0:
            raise TypeError("register_memory(): incompatible function arguments")
        core = self._core
        number = next(core.numbers)
        gpu = mem_loc is MemoryLocationType.GPU
        bus, node = f"0000:{device_id:02x}:00.0" if gpu else "", number % _host.numa_nodes()
        handle = core.table.place.handle() if gpu and BackendType.XGMI in core.backends else bytes(64)
        desc = made(MemoryDesc, core.key, number, device_id, bus, node, ptr, size, mem_loc, handle)
        if BackendType.RDMA in core.backends:
            core.table.put(number, ptr, size)
        for backend in core.backends.values():
            backend.memories[number] = desc
        return desc

    def deregister_memory(self, desc: MemoryDesc) -> None:
        core = self._core
        core.table.put(desc.id, 0, 0)
        for backend in core.backends.values():
            backend.memories.pop(desc.id, None)

    def pop_peer_failure(self) -> PeerFailureEvent | None:
        """The oldest failure of a connection that nobody has taken."""
        rdma = self._core.backends.get(BackendType.RDMA)
        found: PeerFailureEvent | None = rdma.pop_failure() if rdma is not None else None
        return found

    def create_session(self, local: MemoryDesc, remote: MemoryDesc) -> IOEngineSession | None:
        """A session, or ``None`` where no transport can serve the pair.

        Raises:
            RuntimeError: RDMA could not connect, or not fetch the remote key.
        """
        backend = self._core.select(local, remote)
        if backend is None:
            return None
        state = backend.session(local, remote)
        return None if state is None else IOEngineSession(self._core, backend, local, remote, state)


class IOEngineSession:
    """One pair of memories; it holds raw pointers to its engine and transport."""

    def __init__(self, core: Core, backend: Any, local: MemoryDesc, remote: MemoryDesc, state: Any) -> None:
        self._core, self._backend, self._state = core, backend, state
        self._local, self._remote = local, remote

    def allocate_transfer_uid(self) -> int:
        return next(self._alive().uids)

    def batch_write(self, *args: Any) -> TransferStatus:
        return self._batch("BatchWrite", *args)

    def batch_read(self, *args: Any) -> TransferStatus:
        return self._batch("BatchRead", *args)

    def _alive(self) -> Core:
        if not self._core.running or self._backend not in self._core.backends.values():
            _host.abort("a session outlived its engine or its backend")
        return self._core

    def _batch(self, name: str, near: Any, far: Any, sizes: Any, uid: int) -> TransferStatus:
        self._alive()
        try:
            blocks = _numbers(near), _numbers(far), _numbers(sizes)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name}(): {UNFIT}") from error
        kind = "write" if name == "BatchWrite" else "read"
        found: TransferStatus = self._backend.submit(kind, self._local, self._remote, blocks, uid, state=self._state)
        return found


def _numbers(values: Any) -> U64:
    """Lists, tuples or one-dimensional arrays of integers that are not negative.

    Raises:
        TypeError: They are something else.
    """
    found = np.asarray(values) if len(values) else np.empty(0, np.uint64)
    if found.ndim != 1 or found.dtype.kind not in "iu" or (found.dtype.kind == "i" and (found < 0).any()):
        raise TypeError("these are not offsets")
    return found.astype(np.uint64)
