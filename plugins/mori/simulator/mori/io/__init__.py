"""The names of ``mori.io``; ``TransferStatus`` is not one of them."""

from __future__ import annotations

from .. import _host
from .._configs import (
    BackendType,
    IOEngineConfig,
    MemoryLocationType,
    PeerFailureReason,
    PollCqMode,
    RdmaBackendConfig,
    XgmiBackendConfig,
)
from .._descs import EngineDesc, MemoryDesc
from .._engine import IOEngine, IOEngineSession
from .._onesided import PeerFailureEvent
from .._status import StatusCode

__all__ = [
    "BackendType",
    "EngineDesc",
    "IOEngine",
    "IOEngineConfig",
    "IOEngineSession",
    "MemoryDesc",
    "MemoryLocationType",
    "PeerFailureEvent",
    "PeerFailureReason",
    "PollCqMode",
    "RdmaBackendConfig",
    "StatusCode",
    "XgmiBackendConfig",
]


for _name in _host.lacks():
    _kind, _, _member = _name.partition(".")
    delattr(globals()[_kind], _member)
