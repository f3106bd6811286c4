"""The classes that SGLang gets for the backend ``statelink``, and what they are made of.

SGLang's schedulers import this when they ask for a class. Programs that drive these classes without a scheduler, such
as tests, import it, too. It imports Statelink and SGLang's queues.
"""

from __future__ import annotations

from ._admission import around_decode_add, around_prefill_add
from ._calls import Calls
from ._content import content_of_request
from ._declines import Declines
from ._deferred import around_is_fully_idle, around_resolve
from ._directory import Directory, Instance, Prefill
from ._dp_ranks import RankFinder
from ._failure import TransferFailed
from ._hooks import Announced, announcing, around_init_kv_manager
from ._http import Bootstrap, ask_ranks
from ._inventory import Pools, describe_pools
from ._items import drop_prefix
from ._layers import around_checkpoint, around_run_batch
from ._limits import TESTED_STATE, Server, check_server
from ._manager import Manager, Timeouts
from ._offer_table import KEY_DIGITS, MOST_KEYS, Known, Offered, OfferTable
from ._offering import offered_node
from ._offers import GRACE_SECONDS, Offers
from ._options import ALLOWED, VARIABLE, read_options
from ._proofs import KeyPair, allowed
from ._receiver import Receiver
from ._registrar import Registrar
from ._rows import FIRST_TOKEN, first_token
from ._samples import ROOMS, STRIDE, around_handle_batch, around_send, room_of_sample
from ._seam import SCHEDULER, SEAM, loaded
from ._sender import Sender
from ._server import KEY_HEADER, MOST_ROOMS, PATH, PROOF_HEADER, ROOMS_PATH, SCHEMA, BootstrapServer, Row
from ._stages import around_pop_bootstrapped

__all__ = [
    "ALLOWED",
    "FIRST_TOKEN",
    "GRACE_SECONDS",
    "KEY_DIGITS",
    "KEY_HEADER",
    "MOST_KEYS",
    "MOST_ROOMS",
    "PATH",
    "PROOF_HEADER",
    "ROOMS",
    "ROOMS_PATH",
    "SCHEDULER",
    "SCHEMA",
    "SEAM",
    "STRIDE",
    "TESTED_STATE",
    "VARIABLE",
    "Announced",
    "Bootstrap",
    "BootstrapServer",
    "Calls",
    "Declines",
    "Directory",
    "Instance",
    "KeyPair",
    "Known",
    "Manager",
    "OfferTable",
    "Offered",
    "Offers",
    "Pools",
    "Prefill",
    "RankFinder",
    "Receiver",
    "Registrar",
    "Row",
    "Sender",
    "Server",
    "Timeouts",
    "TransferFailed",
    "allowed",
    "announcing",
    "around_checkpoint",
    "around_decode_add",
    "around_handle_batch",
    "around_init_kv_manager",
    "around_is_fully_idle",
    "around_pop_bootstrapped",
    "around_prefill_add",
    "around_resolve",
    "around_run_batch",
    "around_send",
    "ask_ranks",
    "check_server",
    "content_of_request",
    "describe_pools",
    "drop_prefix",
    "first_token",
    "loaded",
    "offered_node",
    "read_options",
    "room_of_sample",
]
