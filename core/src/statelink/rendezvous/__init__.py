"""A small server where instances are found, and the links' side of it.

Run it with ``statelink rendezvous``, or embed a `RendezvousServer`. A link whose configuration has ``rendezvous`` makes
its own `RendezvousClient`. Nothing that two links have agreed on depends on the server: it may die and come back.
"""

from __future__ import annotations

from ._client import RendezvousClient
from ._server import RendezvousServer

__all__ = ["RendezvousClient", "RendezvousServer"]
