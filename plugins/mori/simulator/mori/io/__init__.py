"""The names of ``mori.io``; ``TransferStatus`` is not one of them."""

from __future__ import annotations

from typing import Any, NoReturn

from .. import _host
from .._configs import (
    BackendType,
    FabricBackendConfig,
    IOEngineConfig,
    MemoryLocationType,
    PollCqMode,
    RdmaBackendConfig,
    XgmiBackendConfig,
)
from .._configs import TcpBackendConfig as _TcpBackendConfig
from .._descs import EngineDesc, MemoryDesc
from .._engine import IOEngine, IOEngineSession
from .._status import StatusCode

__all__ = [
    "BackendType",
    "EngineDesc",
    "FabricBackendConfig",
    "IOEngine",
    "IOEngineConfig",
    "IOEngineSession",
    "MemoryDesc",
    "MemoryLocationType",
    "PollCqMode",
    "RdmaBackendConfig",
    "StatusCode",
    "XgmiBackendConfig",
    "fabric_alloc",
    "fabric_free",
    "fabric_mem_pool",
    "fabric_torch_allocator",
    "make_fabric_mem_pool",
    "set_log_level",
    "use_fabric_torch_allocator",
]


def __getattr__(name: str) -> Any:
    """One name that only the branch has."""
    if name == "TcpBackendConfig" and _host.has_tcp():
        return _TcpBackendConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


for _name in _host.lacks():
    _kind, _, _member = _name.partition(".")
    delattr(globals()[_kind], _member)


def _no_fabric(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("fabric memory is not supported on this machine")


fabric_alloc = fabric_free = fabric_torch_allocator = use_fabric_torch_allocator = _no_fabric
make_fabric_mem_pool = fabric_mem_pool = _no_fabric


def set_log_level(level: str) -> None:
    """Takes a name of a level; there are no logs here."""
    if not isinstance(level, str):
        raise TypeError("set_log_level(): incompatible function arguments")
