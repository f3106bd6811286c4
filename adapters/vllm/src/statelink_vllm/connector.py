"""The parts of the connector: its two sides, their messages to each other, and the description of vLLM's caches.

Programs that drive these parts without an engine, such as tests, import this. It imports Statelink and vLLM.
"""

from __future__ import annotations

from ._connector import StatelinkConnector
from ._content import content_of_request
from ._held import HeldBlocks
from ._inventory import Group, Model, describe_cache
from ._leftovers import Leftovers
from ._limits import check_server
from ._messages import Address, FromWorker, Keep, Receive, Send, ToWorker
from ._options import ALLOWED, read_options
from ._params import answer, content_in, room_of, source_of
from ._seam import differences
from ._stats import PromMetrics, TransferStats
from ._worker import WorkerSide

__all__ = [
    "ALLOWED",
    "Address",
    "FromWorker",
    "Group",
    "HeldBlocks",
    "Keep",
    "Leftovers",
    "Model",
    "PromMetrics",
    "Receive",
    "Send",
    "StatelinkConnector",
    "ToWorker",
    "TransferStats",
    "WorkerSide",
    "answer",
    "check_server",
    "content_in",
    "content_of_request",
    "describe_cache",
    "differences",
    "read_options",
    "room_of",
    "source_of",
]
