"""Errors that plugins over native libraries have in common."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from statelink.errors import TransferError

if TYPE_CHECKING:
    from statelink.state import Region

__all__ = ["torch_place", "unreachable", "unregistered"]

REGISTERS = re.compile("register|registration|reg_mr", re.IGNORECASE)


def unreachable(library: str, peer: str, cause: object, *, backend: str, hint: str = "") -> TransferError:
    """The error of a peer that cannot be connected.

    Some libraries register memory only when they connect. If ``cause`` is about that, the error has the code
    ``backend.memory``, and the core adds which setting of an allocator may be the reason.
    """
    what = f"a peer cannot be connected over {library}"
    code = "backend.memory" if REGISTERS.search(str(cause)) else None
    return TransferError(what, cause=str(cause), hint=hint, code=code, backend=backend, peer=peer)


def unregistered(
    what: str | int, region: Region, cause: object, *, backend: str, library: str | None = None, hint: str = ""
) -> TransferError:
    """The error of a region that cannot be registered: its number, or whatever else it is called."""
    what = f"region {what}" if isinstance(what, int) else what
    where = f"{region.nbytes} bytes of {region.kind} at {region.address:#x}"
    said = f"{where}: {cause}"
    return TransferError(f"{what} could not be registered", cause=said, hint=hint, backend=backend, library=library)


def torch_place(region: Region, library: str, *, backend: str) -> tuple[str, int]:
    """``dram`` or ``cuda``, and the number of the device, for a library that knows these kinds of memory.

    Raises:
        TransferError: The region has another kind of memory.
    """
    kind, _, device = region.kind.partition(":")
    if kind not in ("dram", "cuda") or (device and not device.isdecimal()):
        raise TransferError(
            f"memory of kind {region.kind!r} is unknown to {library}",
            cause=f"the region at {region.address:#x} has it",
            hint="it moves 'dram' and 'cuda:<device>', which is also torch's name for AMD's GPUs",
            backend=backend,
        )
    return kind, int(device or 0)
