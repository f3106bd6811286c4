"""What plugins over native libraries have in common: a machine to look at, trials that may end a process, no cancel.

Use what fits; nothing else of Statelink needs it.
"""

from __future__ import annotations

from ._descriptor import Descriptor, Located, session
from ._errors import torch_place, unreachable, unregistered
from ._ledger import Ledger, Posted, Remote
from ._machine import Ended, elsewhere, environment, lacking, loads, needs, on_machine, rdma_devices, settings
from ._pinning import check_pinnable
from ._posting import PostingBackend

__all__ = [
    "Descriptor",
    "Ended",
    "Ledger",
    "Located",
    "Posted",
    "PostingBackend",
    "Remote",
    "check_pinnable",
    "elsewhere",
    "environment",
    "lacking",
    "loads",
    "needs",
    "on_machine",
    "rdma_devices",
    "session",
    "settings",
    "torch_place",
    "unreachable",
    "unregistered",
]
