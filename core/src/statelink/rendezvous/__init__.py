"""A small server that knows the addresses of instances, and its client in a link.

Run it with ``statelink rendezvous``, or embed a `RendezvousServer`. A link whose configuration has ``rendezvous`` makes
its own `RendezvousClient`. Links that are connected do not depend on the server: it may die and come back.
"""

from __future__ import annotations

from ._client import RendezvousClient
from ._server import RendezvousServer

__all__ = ["RendezvousClient", "RendezvousServer"]
