"""What can be set, and with what effect."""

from __future__ import annotations

import msgspec

__all__ = ["Options"]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the ``mooncake`` backend.

    The library reads much else from ``MC_*`` in the environment, ``MC_TRANSFER_TIMEOUT`` (seconds until a stopped
    peer fails a transfer; 30) among it. Leave ``MC_TCP_PROTO`` alone: its older value reports a write as done before
    its bytes are there.

    Attributes:
        protocol: ``auto`` leaves the choice to the library: RDMA where this host has a device, TCP elsewhere.
            ``tcp`` forces TCP. Builds of the library for one transport want its name (``efa``, ``hip``, ...).
        devices: RDMA devices to use, separated by commas, such as ``mlx5_0,mlx5_1``; empty for all.
    """

    protocol: str = "auto"
    devices: str = ""

    def __post_init__(self) -> None:
        if not self.protocol.isidentifier():
            raise ValueError(f"`protocol` is auto, tcp or the name of a transport, not {self.protocol!r}")
