"""The parts of the connector: its two sides, their messages to each other, and the description of vLLM's caches.

Programs that drive these parts without an engine, such as tests, import this. It imports Statelink and vLLM.
"""

from __future__ import annotations

from ._chunks import EarlyRooms
from ._connector import StatelinkConnector
from ._content import content_of_request
from ._held import HeldBlocks
from ._inventory import Group, Model, describe_cache
from ._leases import Leases
from ._leftovers import Leftovers
from ._limits import check_server
from ._messages import Address, Chunk, FromWorker, Keep, Open, Receive, Send, ToWorker
from ._options import ALLOWED, Options, read_options
from ._params import Prefix, Source, Wanted, answer, refusal, wanted
from ._places import Place, place_of
from ._rest import rest
from ._seam import SEAM
from ._stats import PromMetrics, TransferStats
from ._unclaimed import Unclaimed
from ._worker import WorkerSide

__all__ = [
    "ALLOWED",
    "SEAM",
    "Address",
    "Chunk",
    "EarlyRooms",
    "FromWorker",
    "Group",
    "HeldBlocks",
    "Keep",
    "Leases",
    "Leftovers",
    "Model",
    "Open",
    "Options",
    "Place",
    "Prefix",
    "PromMetrics",
    "Receive",
    "Send",
    "Source",
    "StatelinkConnector",
    "ToWorker",
    "TransferStats",
    "Unclaimed",
    "Wanted",
    "WorkerSide",
    "answer",
    "check_server",
    "content_of_request",
    "describe_cache",
    "place_of",
    "read_options",
    "refusal",
    "rest",
    "wanted",
]
