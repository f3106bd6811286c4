"""From the configuration to the directory of a link: finds its class by the scheme of the address."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelink.config import read_options
from statelink.errors import ConfigError
from statelink.link import StaticRendezvous
from statelink.registry import load_named

from ._directory import Directory, DirectoryConfig, Instance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statelink.config import LinkConfig
    from statelink.link import Peer
    from statelink.wire import Endpoint, Keys

__all__ = [
    "DirectoryRendezvous",
    "check_directory",
    "check_directory_options",
    "connecting",
    "list_instances",
    "load_directory",
]

GROUP = "statelink.directories"


def load_directory(config: LinkConfig) -> type[Directory]:
    """Import the class for the scheme of ``config.rendezvous``.

    Raises:
        ConfigError: The address has no scheme, no package brings this one, several do, or it does not load.
    """
    scheme, mark, _ = config.rendezvous.partition("://")
    if not mark:
        raise ConfigError(
            f"{config.rendezvous!r:.120} is not an address of a directory",
            cause="it has no scheme, which says what kind of directory it is",
            hint="tcp://host:port is a rendezvous server",
        )
    kind: type[Directory] = load_named(
        GROUP,
        scheme,
        Directory,  # type: ignore[type-abstract]  # `load_named` refuses a class that lacks methods
        what="directory",
        code="rendezvous.unknown",
    )
    return kind


def check_directory_options(config: LinkConfig) -> None:
    """Check the options of the directory by their names and types.

    Raises:
        ConfigError: As `load_directory`; or an option is unknown or wrong, or there are options and no directory.
    """
    if config.rendezvous:
        _read(load_directory(config), config)
    elif config.rendezvous_options:
        raise ConfigError(
            "options of a directory are configured",
            cause="'rendezvous' is empty, so there is no directory",
            hint="set 'rendezvous' to its address",
        )


def check_directory(config: LinkConfig, *, keys: Keys | None) -> None:
    """Check that a link can use ``config.rendezvous``, without asking the directory. Opens nothing.

    Raises:
        ConfigError: As `check_directory_options` and `Directory.check`.
    """
    if config.rendezvous:
        kind, given = _of(config, keys)
        kind.check(given)


def connecting(config: LinkConfig, *, link: str, keys: Keys | None) -> Directory:
    """The client for ``config.rendezvous``. Its thread runs until it is closed. The server may be absent.

    Args:
        config: The link's configuration.
        link: Name of the link.
        keys: The link's keys.

    Raises:
        ConfigError: No package brings this directory, or an option is unknown; and as `Directory.check`.
    """
    kind, given = _of(config, keys)
    return kind(given, link=link)


def list_instances(config: LinkConfig, *, keys: Keys | None) -> list[Instance]:
    """Ask the directory of ``config.rendezvous`` for all instances, in order of name. Blocks, for seconds at most.

    Args:
        config: A link's configuration. Nothing is registered.
        keys: The keys to ask with.

    Raises:
        ConfigError: No package brings this directory, or the address, a key, a file or an option cannot be used.
        PeerError: The directory does not answer, or refuses.
    """
    kind, given = _of(config, keys)
    return kind.instances(given)


def _of(config: LinkConfig, keys: Keys | None) -> tuple[type[Directory], DirectoryConfig]:
    kind = load_directory(config)
    return kind, _read(kind, config)._replace(keys=keys if kind.takes_keys else None)


def _read(kind: type[Directory], config: LinkConfig) -> DirectoryConfig:
    what = f"options of the directory {config.rendezvous.partition('://')[0]!r:.80}"
    options = read_options(kind.Options, config.rendezvous_options, what)
    return DirectoryConfig(config.rendezvous, options, insecure=config.insecure)


class DirectoryRendezvous:
    """The `Rendezvous` of a link with a directory, which is asked for instances that are not configured. Thread-safe.

    Args:
        directory: The directory. `close` closes it.
        peers: Instances whose addresses are configured.
    """

    def __init__(self, directory: Directory, peers: Mapping[str, Sequence[str]]) -> None:
        self._directory = directory
        self._configured = StaticRendezvous(peers)

    def resolve(self, peer: Peer) -> tuple[Endpoint, ...] | None:
        """See `Rendezvous.resolve` and `Directory.resolve`."""
        return self._directory.resolve(peer) if self._configured.lacks(peer) else self._configured.resolve(peer)

    def names(self, peer: Peer) -> bool:
        """Whether the engine named an instance that is looked up, and gave no address."""
        return self._configured.lacks(peer)

    def explain(self, peer: Peer | None) -> tuple[str, str]:
        """See `Directory.explain`."""
        return self._directory.explain(None if peer is None else str(peer))

    def close(self) -> None:
        """Close the directory."""
        self._directory.close()
