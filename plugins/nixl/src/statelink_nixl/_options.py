"""The options and their effects."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Options"]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the ``nixl`` backend.

    Attributes:
        backends: NIXL's own backends to create, in order, and the parameters of each, all of them strings.
            For UCX: ``num_workers``, ``split_batch_size``, ``ucx_error_handling_mode``, ``engine_config``. NIXL
            ignores unknown parameters. Both sides need a common backend that moves bytes between processes. Backends
            only for files and object stores are refused.
        ucx: UCX settings without their ``UCX_``, such as ``{"TLS": "rc,cuda", "NET_DEVICES": "mlx5_0:1"}``.
            They are set while this link's UCX starts, and take precedence over the environment. The
            environment is restored afterwards.
        devices: The network devices that UCX may use, such as ``["mlx5_0:1", "eth0"]``; empty for all. It is
            UCX's ``NET_DEVICES``: NIXL's own ``ucx_devices`` has no effect in 1.5.1.
        num_threads: Threads that share batches of 256 blocks or more, for each backend that has them (UCX,
            LIBFABRIC); 0 for none. One thread does not use all of a machine's memory bandwidth: with two, 512 MiB in
            random pages take half of the time on one host. Each thread has a connection of its own to each peer.
        sync_mode: How NIXL guards an agent against several threads: ``strict`` with a mutex, ``rw`` with a lock that
            lets several readers in. NIXL's default is neither, and two threads then hang in it.
        connect_timeout: Seconds in which a peer has to take a first small write when it is connected. This connects
            the transports before the first request, and refuses an unreachable peer. 0 skips it.
        progress_interval_us: Microseconds for which NIXL's progress thread rests between two rounds while nothing
            happens. 0 keeps a core busy as long as the link is open.
    """

    backends: dict[str, dict[str, str]] = msgspec.field(default_factory=lambda: {"UCX": {}})
    ucx: dict[str, str] = {}
    devices: tuple[str, ...] = ()
    num_threads: int = 2
    sync_mode: Literal["strict", "rw"] = "strict"
    connect_timeout: float = 10.0
    progress_interval_us: int = 100

    def __post_init__(self) -> None:
        if not self.backends:
            raise ValueError("`backends` names no backend of NIXL; the usual one is UCX")
        if self.devices and "UCX" not in self.backends:
            raise ValueError("`devices` are UCX's, and `backends` does not name it")
        if self.devices and "NET_DEVICES" in self.ucx:
            raise ValueError("`devices` and NET_DEVICES in `ucx` say the same thing: set one of them")
        if any(not device or "," in device for device in self.devices):
            raise ValueError(f"`devices` is a list of names, not {list(self.devices)}")
        if self.num_threads < 0:
            raise ValueError(f"`num_threads` is not below 0, but {self.num_threads}")
        if not self.connect_timeout >= 0:
            raise ValueError(f"`connect_timeout` is a number of seconds, not {self.connect_timeout}")
        if self.progress_interval_us < 0:
            raise ValueError(f"`progress_interval_us` is not below 0, but {self.progress_interval_us}")
