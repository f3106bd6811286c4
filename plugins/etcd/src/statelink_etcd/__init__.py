"""etcd as the directory of a fleet of Statelink's links.

Importing this package imports no HTTP client. A link that uses etcd does.
"""

from __future__ import annotations

from ._cluster import Cluster, Options
from ._directory import EtcdDirectory
from ._gateway import Waits
from ._listing import instances

__all__ = ["Cluster", "EtcdDirectory", "Options", "Waits", "instances"]
