"""The options and their effects."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from statelink.backend import Ports

__all__ = ["Options"]

REFUSED = {
    "FORCE_TCP": "set `protocol` to tcp",
    "MIN_RPC_PORT": "set `port`",
    "MAX_RPC_PORT": "set `port`",
    "LOG_DIR": "the library ends the process when it is imported with it",
    "TCP_PROTO": "its older value reports a write as done before its bytes are there",
}


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the ``mooncake`` backend.

    Attributes:
        protocol: ``auto`` leaves the choice to the library: RDMA if this host has a device, otherwise TCP. ``tcp``
            forces TCP. Builds of the library for one transport need its name (``efa``, ``hip``, ...).
        devices: RDMA devices to use, separated by commas, such as ``mlx5_0,mlx5_1``; empty for all.
        port: The range of ports from which engines take theirs, two each over TCP, such as ``7200-7299``. With 0, the
            library's own: 15000 to 17000. All links of a process have the same.
        mc: The library's own settings without their ``MC_``: ``TRANSFER_TIMEOUT`` (seconds until a stopped peer fails a
            transfer; 30), ``GID_INDEX``, ``IB_PORT``, ``MTU``, ``NUM_QP_PER_EP`` and so on. The library reads them
            once, when it is imported, so all links of a process have the same. ``TCP_PROTO`` is refused, because its
            older value reports a write as done before its bytes are there.
    """

    protocol: str = "auto"
    devices: str = ""
    port: int | str = 0
    mc: dict[str, str] = {}

    def __post_init__(self) -> None:
        if not self.protocol.isidentifier():
            raise ValueError(f"`protocol` is auto, tcp or the name of a transport, not {self.protocol!r}")
        ports = Ports.read(self.port)
        if ports.first and not ports.several:
            raise ValueError(f"`port` is {ports}: an engine listens at two ports over TCP, so give a range of them")
        for name, better in REFUSED.items():
            if name in self.mc:
                raise ValueError(f"`mc` sets {name}: {better}")
        odd = [name for name in self.mc if not name.isidentifier() or name.upper() != name or name.startswith("MC_")]
        if odd:
            raise ValueError(f"`mc` has names in capitals and without their MC_, not {', '.join(odd)}")

    @property
    def settings(self) -> Mapping[str, str]:
        """The library's own settings without their ``MC_``: ``mc``, and what stands for ``port``."""
        ports = Ports.read(self.port)
        if not ports.first:
            return self.mc
        return {**self.mc, "MIN_RPC_PORT": str(ports.first), "MAX_RPC_PORT": str(ports.last)}
