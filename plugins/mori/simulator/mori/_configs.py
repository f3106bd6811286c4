"""Enumerations and configurations."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from typing import Any, TypeVar

_Kind = TypeVar("_Kind", bound="_Checked")


class _Type(enum.EnumMeta):
    def __getitem__(cls, name: Any) -> Any:
        raise TypeError("'pybind11_type' object is not subscriptable")


class _Native(enum.Enum, metaclass=_Type):
    def __int__(self) -> int:
        return int(self.value)


class BackendType(_Native):
    Unknown = 0
    XGMI = 1
    RDMA = 2
    TCP = 3
    FABRIC = 4


class MemoryLocationType(_Native):
    Unknown = 0
    CPU = 1
    GPU = 2


class PollCqMode(_Native):
    POLLING = 0
    EVENT = 1


class PeerFailureReason(_Native):
    UNKNOWN = 0
    PEER_UNREACHABLE = 1
    LOCAL_QP_ERROR = 2


class _Checked:
    """Fields take what their C++ type takes."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self.__class__.__annotations__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        wanted = str(self.__class__.__annotations__[name])
        kinds = {"int": int, "bool": int, "str": str, "PollCqMode": PollCqMode}
        if not isinstance(value, kinds[wanted]):
            raise TypeError(f"{type(self).__name__}.{name}: incompatible type {type(value).__name__}")
        super().__setattr__(name, {"int": int, "bool": bool}.get(wanted, lambda same: same)(value))


def _bound(kind: type[_Kind]) -> type[_Kind]:
    """A constructor that refuses arguments as the library's bindings do, on several lines."""
    plain = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            plain(self, *args, **kwargs)
        except TypeError:
            name, fields = type(self).__name__, kind.__annotations__
            taken = ", ".join(f"{field}: {fields[field]}" for field in fields)
            given = ", ".join(f"{argument}={value!r}" for argument, value in kwargs.items())
            raise TypeError(
                "__init__(): incompatible constructor arguments. The following argument types are supported:\n"
                f"    1. mori.cpp.libmori_pybinds.{name}({taken})\n\nInvoked with: kwargs: {given}"
            ) from None

    type.__setattr__(kind, "__init__", init)
    return kind


@_bound
@dataclass(eq=False)
class IOEngineConfig(_Checked):
    host: str = ""
    port: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise TypeError("IOEngineConfig(): incompatible constructor arguments")


@_bound
@dataclass(eq=False, kw_only=False)
class RdmaBackendConfig(_Checked):
    qp_per_transfer: int = 1
    post_batch_size: int = -1
    num_worker_threads: int = -1
    poll_cq_mode: PollCqMode = PollCqMode.POLLING
    enable_notification: bool = True
    notif_per_qp: int = 1024
    enable_transfer_chunking: bool = False
    chunk_bytes: int = 65536
    max_chunks_per_transfer: int = 64
    num_nics_per_transfer: int = 1


@_bound
@dataclass(eq=False)
class XgmiBackendConfig(_Checked):
    num_streams: int = 64
    num_events: int = 64


_ENVIRONMENT = {
    "qp_per_transfer": "MORI_IO_QP_PER_TRANSFER",
    "post_batch_size": "MORI_IO_POST_BATCH_SIZE",
    "num_worker_threads": "MORI_IO_NUM_WORKER_THREADS",
    "poll_cq_mode": "MORI_IO_POLL_CQ_MODE",
    "enable_notification": "MORI_IO_ENABLE_NOTIFICATION",
    "enable_transfer_chunking": "MORI_IO_ENABLE_CHUNKING",
    "chunk_bytes": "MORI_IO_CHUNK_BYTES",
    "max_chunks_per_transfer": "MORI_IO_MAX_CHUNKS",
    "num_nics_per_transfer": "MORI_IO_NUM_NICS_PER_TRANSFER",
}


def effective(config: RdmaBackendConfig) -> RdmaBackendConfig:
    """With the environment, which silently wins.

    Raises:
        RuntimeError: The combination is invalid.
    """
    made = RdmaBackendConfig(**{name: getattr(config, name) for name in RdmaBackendConfig.__annotations__})
    for name, variable in _ENVIRONMENT.items():
        text = os.environ.get(variable)
        if text is None:
            continue
        if name == "poll_cq_mode":
            made.poll_cq_mode = PollCqMode.EVENT if text in ("1", "event") else PollCqMode.POLLING
        elif name.startswith("enable_"):
            setattr(made, name, text.lower() in ("1", "true", "on"))
        else:
            setattr(made, name, int(text))
    if made.enable_notification and made.notif_per_qp < 1:
        raise RuntimeError("Invalid RDMA config: notifPerQp must be >= 1 when notification is enabled")
    if made.enable_transfer_chunking and made.chunk_bytes < 4096:
        raise RuntimeError("Invalid RDMA config: chunkBytes must be >= 4096 when chunking is enabled")
    return made
