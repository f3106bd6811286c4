"""Which transport carries the bytes to a peer. NIXL does not say, and neither does UCX through it.

What it can be follows from the devices, from where the peer is, and from UCX's own settings. Where that leaves TCP and
one other, a probe transfer tells: the kernel counts the bytes of every TCP connection of this process, and those that
did not grow by it did not carry it.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from statelink.backend import UNKNOWN
from statelink.backend.native import on_machine, rdma_devices

if TYPE_CHECKING:
    from ._options import Options

__all__ = ["boot_id", "possible", "sent_over_tcp", "told"]

RDMA, TCP, SHM, CUDA = "rdma", "tcp", "shm", "cuda_ipc"
GROUPS = {
    RDMA: "ib rc rc_x rc_v rc_mlx5 rc_verbs ud ud_x ud_v ud_mlx5 ud_verbs dc dc_x dc_mlx5 srd gga gga_mlx5",
    TCP: "tcp",
    SHM: "sm shm mm posix sysv xpmem cma knem",
    CUDA: "cuda cuda_ipc",
    "": "self cuda_copy gdr_copy",
}
FAMILIES = {name: family for family, names in GROUPS.items() for name in names.split()}
"""UCX's names of transports, and of groups of them, and what they are between two processes."""
EVERYTHING = frozenset({RDMA, TCP, SHM, CUDA})
ACKED, SENT = 120, 200
"""Where ``struct tcp_info`` has ``tcpi_bytes_acked`` and, since Linux 4.19, ``tcpi_bytes_sent``."""


def possible(options: Options, environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """What UCX may use on this machine; empty where another backend of NIXL may carry the bytes."""
    if list(options.backends) != ["UCX"]:
        return frozenset()
    found = _of_setting(options.ucx.get("TLS", environment.get("UCX_TLS", "all")))
    found -= set() if rdma_devices() else {RDMA}
    return found if on_machine("/dev/nvidiactl").exists() else found - {CUDA}


def told(may: frozenset[str], *, near: bool, dram: bool, over_tcp: bool | None) -> str:
    """The one transport that is left, or `UNKNOWN`.

    Args:
        may: What UCX may use here.
        near: Whether the peer may be on this host.
        dram: Whether all memory of both sides is the host's.
        over_tcp: Whether a probe of host memory went over TCP; ``None`` if nobody looked.
    """
    left = set(may)
    if not near:
        left -= {SHM, CUDA}
    if dram:
        left -= {CUDA}
        if over_tcp is not None:
            left = left & {TCP} if over_tcp else left - {TCP}
    return left.pop() if len(left) == 1 else UNKNOWN


def sent_over_tcp() -> int:
    """Bytes that all TCP connections of this process have sent so far, as the kernel counts them."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or no socket
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with closing(socket.socket(fileno=os.dup(int(name)))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    counts = [struct.unpack_from("=Q", info, at)[0] for at in (ACKED, SENT) if len(info) >= at + 8]
                    total += max(counts, default=0)
    return total


def boot_id() -> str:
    """What tells this host's kernel from any other's; empty if it does not say."""
    try:
        return on_machine("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _of_setting(setting: str) -> frozenset[str]:
    """What ``UCX_TLS`` leaves; everything, where it names what is not known here."""
    words = [word.strip().partition(":")[0] for word in setting.split(",") if word.strip()]
    without = bool(words) and words[0].startswith("^")
    words = [word.lstrip("^\\") for word in words]
    if any(word not in FAMILIES for word in words):
        return EVERYTHING
    # To leave one transport of a family out leaves the others: only a whole family's name takes it away.
    whole = {"ib": RDMA, "tcp": TCP, "sm": SHM, "shm": SHM, "cuda": CUDA}
    if without:
        return EVERYTHING - {whole[word] for word in words if word in whole}
    return frozenset(FAMILIES[word] for word in words) - {""}
