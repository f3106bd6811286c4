"""Finds out which transport carries the bytes to a peer, because neither NIXL nor UCX tells.

The possible transports follow from the devices, the peer's host, and UCX's settings. If TCP and one other are left, a
probe transfer decides: the kernel counts the bytes of every TCP connection of this process. If the counts did not grow
with the transfer, TCP did not carry it.
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

__all__ = ["has_card", "leaves_out_cuda", "possible", "sent_over_tcp", "told", "with_cuda"]

RDMA, TCP, SHM, CUDA = "rdma", "tcp", "shm", "cuda_ipc"
GROUPS = {
    RDMA: "ib rc rc_x rc_v rc_mlx5 rc_verbs ud ud_x ud_v ud_mlx5 ud_verbs dc dc_x dc_mlx5 srd gga gga_mlx5",
    TCP: "tcp",
    SHM: "sm shm mm posix sysv xpmem cma knem",
    CUDA: "cuda cuda_ipc",
    "": "self cuda_copy gdr_copy",
}
FAMILIES = {name: family for family, names in GROUPS.items() for name in names.split()}
"""UCX's names of transports and of groups, and the transport that each is between two processes."""
EVERYTHING = frozenset({RDMA, TCP, SHM, CUDA})
COPIES = frozenset({"all", "cuda", "cuda_copy"})
"""The names with which UCX can read and write memory of CUDA."""
NVIDIA, DISPLAY = "0x10de", "0x03"
"""The vendor of a PCI device, and how the class of a graphics card begins."""
ACKED, SENT = 120, 200
"""Where ``struct tcp_info`` has ``tcpi_bytes_acked`` and, since Linux 4.19, ``tcpi_bytes_sent``."""


def possible(options: Options, environment: Mapping[str, str] = os.environ, *, card: bool = False) -> frozenset[str]:
    """The transports that UCX may use on this machine; empty if another NIXL backend may carry the bytes.

    ``card``: whether there certainly is a graphics card, since memory of it was registered.
    """
    if list(options.backends) != ["UCX"]:
        return frozenset()
    found = _of_setting(options.ucx.get("TLS", environment.get("UCX_TLS", "all")))
    found -= set() if rdma_devices() else {RDMA}
    return found if card or on_machine("/dev/nvidiactl").exists() else found - {CUDA}


def leaves_out_cuda(options: Options, environment: Mapping[str, str] = os.environ) -> str:
    """The setting ``TLS`` of UCX, if UCX cannot use memory of CUDA with it; otherwise empty."""
    setting = options.ucx.get("TLS", environment.get("UCX_TLS", "all"))
    words = [word.strip().partition(":")[0] for word in setting.split(",") if word.strip()]
    without = bool(words) and words[0].startswith("^")
    named = COPIES & {word.lstrip("^\\") for word in words}
    return setting if words and without == bool(named) else ""


def with_cuda(options: Options, environment: Mapping[str, str] = os.environ) -> str:
    """The setting ``TLS`` with cuda_copy added, where NIXL refuses to start without; empty if nothing is to be changed.

    On a host with a graphics card of NVIDIA, NIXL 1.5.1 refuses a list of transports that has none for CUDA, for host
    memory, too. UCX only warns where there is no CUDA. A list of exclusions says what is not wanted, and stays.
    """
    setting = leaves_out_cuda(options, environment)
    if list(options.backends) != ["UCX"] or not setting or setting.lstrip().startswith("^") or not has_card():
        return ""
    return f"{setting},cuda_copy"


def has_card() -> bool:
    """Whether the PCI bus has a graphics card of NVIDIA, as NIXL looks for one."""
    for device in on_machine("/sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if vendor == NVIDIA and kind.startswith(DISPLAY):
                return True
    return False


def told(may: frozenset[str], *, near: bool, cards: int, over_tcp: bool | None) -> str:
    """The one transport that is left between two kinds of memory, or `UNKNOWN`.

    Args:
        may: The transports that UCX may use here.
        near: Whether the peer may be on this host.
        cards: How many of the two ends are memory of a card.
        over_tcp: Whether a probe between the same kinds went over TCP; ``None`` if nobody looked.
    """
    left = set(may)
    if not near:
        left -= {SHM, CUDA}
    if cards < 2:
        left -= {CUDA}  # it needs memory of cards on both sides
    else:
        left -= {SHM}  # these are ways into the host memory of another process
    if over_tcp is not None:
        left = left & {TCP} if over_tcp else left - {TCP}
    return left.pop() if len(left) == 1 else UNKNOWN


def sent_over_tcp() -> int:
    """Bytes that all TCP connections of this process have sent so far, by the kernel's count."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed, or is no socket
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with closing(socket.socket(fileno=os.dup(int(name)))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    counts = [struct.unpack_from("=Q", info, at)[0] for at in (ACKED, SENT) if len(info) >= at + 8]
                    total += max(counts, default=0)
    return total


def _of_setting(setting: str) -> frozenset[str]:
    """The transports that ``UCX_TLS`` allows; all of them if it has an unknown name."""
    words = [word.strip().partition(":")[0] for word in setting.split(",") if word.strip()]
    without = bool(words) and words[0].startswith("^")
    words = [word.lstrip("^\\") for word in words]
    if any(word not in FAMILIES for word in words):
        return EVERYTHING
    # Excluding one transport of a family leaves the others. Only the name of the family excludes all of it.
    whole = {"ib": RDMA, "tcp": TCP, "sm": SHM, "shm": SHM, "cuda": CUDA}
    if without:
        return EVERYTHING - {whole[word] for word in words if word in whole}
    return frozenset(FAMILIES[word] for word in words) - {""}
