"""The interface that a backend plugin implements, and the strategies that carry state over it.

A backend moves bytes between registered memory of two processes. It knows no state type, no topology and no message
of the protocol. Start with `Backend`; the embedded backend in ``statelink.tcp`` is the reference.
"""

from __future__ import annotations

from statelink._logs import Tally, logger
from statelink.plan import Blocks, Move, RegionTable
from statelink.state import Region

from ._capabilities import ANY, Capabilities, Check, Fence, Probe, Side, SubmitMode, Verdict
from ._copying import CopyingBackend
from ._descriptors import pack_descriptors, unpack_descriptors
from ._ends import Ends
from ._hooks import Moved, RoomReport, hookimpl
from ._interface import (
    API_VERSION,
    MAX_DESCRIPTOR,
    UNKNOWN,
    Backend,
    BackendContext,
    Batch,
    Diagnosing,
    EventDriven,
    EventLoop,
    Fencing,
    Landing,
    MemoryKinds,
    Outcome,
    Transfer,
    Transports,
)
from ._machine import boot_id
from ._ports import Ports
from ._process import close_in_children, leave_in_library
from ._ranges import Ranges
from ._raw import RawLibrary, RawTransfers
from ._strategy import (
    DIRECT,
    MAX_PREPARED,
    Arrival,
    HookContext,
    ReceiveContext,
    ReceiveHook,
    SendContext,
    SendHook,
    Strategy,
)

__all__ = [
    "ANY",
    "API_VERSION",
    "DIRECT",
    "MAX_DESCRIPTOR",
    "MAX_PREPARED",
    "UNKNOWN",
    "Arrival",
    "Backend",
    "BackendContext",
    "Batch",
    "Blocks",
    "Capabilities",
    "Check",
    "CopyingBackend",
    "Diagnosing",
    "Ends",
    "EventDriven",
    "EventLoop",
    "Fence",
    "Fencing",
    "HookContext",
    "Landing",
    "MemoryKinds",
    "Move",
    "Moved",
    "Outcome",
    "Ports",
    "Probe",
    "Ranges",
    "RawLibrary",
    "RawTransfers",
    "ReceiveContext",
    "ReceiveHook",
    "Region",
    "RegionTable",
    "RoomReport",
    "SendContext",
    "SendHook",
    "Side",
    "Strategy",
    "SubmitMode",
    "Tally",
    "Transfer",
    "Transports",
    "Verdict",
    "boot_id",
    "close_in_children",
    "hookimpl",
    "leave_in_library",
    "logger",
    "pack_descriptors",
    "unpack_descriptors",
]
