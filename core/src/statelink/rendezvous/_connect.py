"""Makes the client of a link for the directory that its configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from statelink import wire
from statelink.link import Rendezvous

from ._client import RendezvousClient
from ._cluster import Cluster, is_etcd
from ._etcd import EtcdClient

if TYPE_CHECKING:
    from statelink.config import LinkConfig
    from statelink.wire import Keys

__all__ = ["Directory", "check_directory", "connect"]


class Directory(Rendezvous, Protocol):
    """A `Rendezvous` with which a link registers."""

    def register(self, instance: str, rank: int, ranks: int, address: str) -> None:
        """Register a rank at ``address``, and keep it registered until the directory is closed. Does not block."""


def connect(config: LinkConfig, *, link: str, keys: Keys | None) -> Directory:
    """The client for ``config.rendezvous``. Its thread runs until it is closed. The server need not be there.

    Args:
        config: The link's configuration.
        link: Name of the link.
        keys: The link's keys. Etcd has users and certificates instead.

    Raises:
        ConfigError: The address, a key, a file or an option cannot be used.
    """
    if is_etcd(config.rendezvous):
        cluster = Cluster.of(config.rendezvous, config.etcd, insecure=config.insecure)
        return EtcdClient(cluster, link=link, peers=config.peers)
    return RendezvousClient(config.rendezvous, link=link, keys=keys, peers=config.peers)


def check_directory(config: LinkConfig, *, keys: Keys | None) -> None:
    """Check that a link can use ``config.rendezvous``, without asking the directory. Opens nothing.

    Raises:
        ConfigError: As `connect`.
    """
    if is_etcd(config.rendezvous):
        Cluster.of(config.rendezvous, config.etcd, insecure=config.insecure)
    elif config.rendezvous:
        wire.check_dial(wire.parse_endpoint(config.rendezvous), keys)
