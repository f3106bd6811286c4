"""The names of ``mori.io``; ``TransferStatus`` is not one of them."""

from __future__ import annotations

from typing import Any

from .. import _host
from .._configs import (
    BackendType,
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
    "IOEngine",
    "IOEngineConfig",
    "IOEngineSession",
    "MemoryDesc",
    "MemoryLocationType",
    "PollCqMode",
    "RdmaBackendConfig",
    "StatusCode",
    "XgmiBackendConfig",
]


def __getattr__(name: str) -> Any:
    """One name that only the branch has."""
    if name == "TcpBackendConfig" and _host.has_tcp():
        return _TcpBackendConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


for _name in _host.lacks():
    _kind, _, _member = _name.partition(".")
    delattr(globals()[_kind], _member)
