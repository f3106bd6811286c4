"""Helpers for plugins over native libraries.

They check a machine, try calls that may end the process, and keep transfers of libraries that cannot cancel. Use what
fits. No other part of Statelink needs this package.
"""

from __future__ import annotations

from ._descriptor import Descriptor, Located, session
from ._errors import torch_place, unreachable, unregistered
from ._ledger import Ledger, Posted, PostingBackend, Remote
from ._machine import (
    Ended,
    check_pinnable,
    elsewhere,
    environment,
    lacking,
    loads,
    needs,
    on_machine,
    rdma_devices,
    settings,
)

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
