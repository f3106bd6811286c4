"""Finds the addresses of an instance by its name: through a small server of Statelink's own, or through etcd.

The server is run with ``statelink rendezvous``, or embedded as a `RendezvousServer`. A link whose configuration has
``rendezvous`` makes its own client, from `connecting`. Links that are connected do not depend on the server or on etcd:
either may die and come back.
"""

from __future__ import annotations

from ._client import RendezvousClient
from ._cluster import Cluster, is_etcd
from ._connect import Directory, check_directory, connecting
from ._etcd import EtcdClient
from ._gateway import Waits
from ._listing import Instance, Rank, list_instances
from ._registry import Registry
from ._server import RendezvousServer

__all__ = [
    "Cluster",
    "Directory",
    "EtcdClient",
    "Instance",
    "Rank",
    "Registry",
    "RendezvousClient",
    "RendezvousServer",
    "Waits",
    "check_directory",
    "connecting",
    "is_etcd",
    "list_instances",
]
