"""Makes the client of a link for the directory that its configuration names."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from statelink import wire
from statelink.link import Rendezvous

from ._client import RendezvousClient
from ._cluster import Cluster, is_etcd
from ._etcd import EtcdClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from statelink.config import LinkConfig
    from statelink.wire import Keys

__all__ = ["Directory", "check_directory", "connecting"]


class Directory(Rendezvous, Protocol):
    """A `Rendezvous` with which a link registers."""

    def register(self, instance: str, rank: int, ranks: int, address: str) -> None:
        """Register a rank at ``address``, and keep it registered until the directory is closed. Does not block."""


def connecting(config: LinkConfig, *, link: str, keys: Keys | None) -> Callable[[], Directory]:
    """What makes the client for ``config.rendezvous``. Its thread runs until it is closed. The server may be absent.

    Args:
        config: The link's configuration.
        link: Name of the link.
        keys: The link's keys. Etcd has users and certificates instead.

    Raises:
        ConfigError: The address, a key, a file or an option cannot be used.
    """
    if is_etcd(config.rendezvous):
        cluster = Cluster.of(config.rendezvous, config.etcd, insecure=config.insecure)
        return partial(EtcdClient, cluster, link=link, peers=config.peers)
    return partial(RendezvousClient, config.rendezvous, link=link, keys=keys, peers=config.peers)


def check_directory(config: LinkConfig, *, keys: Keys | None) -> None:
    """Check that a link can use ``config.rendezvous``, without asking the directory. Opens nothing.

    Raises:
        ConfigError: As `connecting`.
    """
    if is_etcd(config.rendezvous):
        Cluster.of(config.rendezvous, config.etcd, insecure=config.insecure)
    elif config.rendezvous:
        wire.check_dial(wire.parse_endpoint(config.rendezvous), keys)
