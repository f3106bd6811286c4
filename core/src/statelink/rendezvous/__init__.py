"""Finds the addresses of an instance by its name, through a directory: a package brings each kind, by its scheme.

The core brings a small server of Statelink's own. It is run with ``statelink rendezvous``, or embedded as a
`RendezvousServer`. A link whose configuration has ``rendezvous`` makes its own client, from `connecting`. Links that
are connected do not depend on their directory, which may die and come back.
"""

from __future__ import annotations

from statelink._json import decode_json
from statelink.wire import MAX_RANKS, Endpoint, check_private, is_loopback, parse_endpoint

from ._connect import connecting, list_instances
from ._directory import Directory, DirectoryConfig, Instance, Rank
from ._server import RendezvousServer

__all__ = [
    "MAX_RANKS",
    "Directory",
    "DirectoryConfig",
    "Endpoint",
    "Instance",
    "Rank",
    "RendezvousServer",
    "check_private",
    "connecting",
    "decode_json",
    "is_loopback",
    "list_instances",
    "parse_endpoint",
]
