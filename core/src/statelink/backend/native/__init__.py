"""What plugins over native libraries have in common: a machine to look at, trials that may end a process, no cancel.

Use what fits; nothing else of Statelink needs it.
"""

from __future__ import annotations

from ._descriptor import Descriptor, Located, session
from ._ledger import Ledger, Posted, Remote
from ._machine import Ended, elsewhere, environment, lacking, loads, rdma_devices

__all__ = [
    "Descriptor",
    "Ended",
    "Ledger",
    "Located",
    "Posted",
    "Remote",
    "elsewhere",
    "environment",
    "lacking",
    "loads",
    "rdma_devices",
    "session",
]
