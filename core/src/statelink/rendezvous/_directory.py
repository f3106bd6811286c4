"""The interface of a directory: what a package implements that brings another one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec

if TYPE_CHECKING:
    from statelink.wire import Endpoint, Keys

__all__ = ["Directory", "DirectoryConfig", "Instance", "Rank"]


class Rank(NamedTuple):
    """A registered rank.

    Attributes:
        rank: Its number.
        address: ``tcp://host:port``, and its public key if it has one.
        link: Link name of its process.
    """

    rank: int
    address: str
    link: str


class Instance(NamedTuple):
    """What is registered of an instance.

    Attributes:
        name: Its name.
        ranks: Number of its ranks, as the first of them says; 0 if no entry can be read.
        registered: The ranks that are registered, in order.
        wrong: What is wrong with the entries, as a clause; empty if nothing is.
    """

    name: str
    ranks: int
    registered: tuple[Rank, ...]
    wrong: str = ""

    @property
    def missing(self) -> list[int]:
        """The ranks that are not registered."""
        present = {each.rank for each in self.registered}
        return [rank for rank in range(self.ranks) if rank not in present]

    @property
    def complete(self) -> bool:
        """Whether links find the instance."""
        return not self.wrong and self.ranks > 0 and not self.missing


class DirectoryConfig(NamedTuple):
    """What a link is configured with for its directory.

    Attributes:
        address: The key ``rendezvous``, with its scheme.
        options: The table ``rendezvous_options``, as an instance of the directory's ``Options``.
        keys: The link's keys; ``None`` without security, and unless the directory ``takes_keys``.
        insecure: Whether secrets may travel beyond loopback without keys or TLS.
    """

    address: str
    options: Any
    keys: Keys | None = None
    insecure: bool = False


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No options."""


class Directory(ABC):
    """The client of a directory in one link: keeps the link registered, and finds instances by their names.

    A package brings one under the scheme of its addresses: an entry point ``acme`` in the group
    ``statelink.directories`` is the class for ``rendezvous = "acme://..."``. Importing its module imports no library of
    the directory, and has no side effects.

    Neither the constructor nor `register` waits for the directory, which may be absent, die and come back. Methods that
    are not said to block return at once. All methods are thread-safe. A method raises nothing but what it is said to
    raise: what goes wrong later is told by `explain` and in the log.

    Args:
        config: Where the directory is, and how the link proves to it who it is. `check` has accepted it.
        link: Name of the link. No other link has the same. It registers under this name.

    Attributes:
        Options: Its options, a subclass of ``msgspec.Struct`` with a default for each field; none by default. The core
            refuses other keys.
        takes_keys: Whether it uses the link's keys. Without this, it does not see them.

    Raises:
        ConfigError: As `check`.
    """

    Options: ClassVar[type[msgspec.Struct]] = NoOptions
    takes_keys: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, config: DirectoryConfig, *, link: str) -> None: ...

    @classmethod
    @abstractmethod
    def check(cls, config: DirectoryConfig) -> None:
        """Check what can be checked without asking the directory. Opens nothing.

        Raises:
            ConfigError: The address, a key, a file or an option cannot be used, or a library is not installed.
        """

    @classmethod
    @abstractmethod
    def instances(cls, config: DirectoryConfig) -> list[Instance]:
        """Ask the directory once for all instances, in order of name. Blocks, for seconds at most.

        Ranks that come or go meanwhile may be in the list or not.

        Raises:
            ConfigError: As `check`.
            PeerError: The directory does not answer (``rendezvous.silent``), or refuses (``rendezvous.refused``).
        """

    @abstractmethod
    def register(self, instance: str, rank: int, ranks: int, address: str) -> None:
        """Register a rank, and keep it registered until the directory is closed. Called once at most.

        An entry of a process that was killed has to expire. A later process replaces an earlier one of the same rank.

        Args:
            instance: Name of the link's instance: any text of at most 512 characters.
            rank: Number of the rank.
            ranks: Number of ranks of the instance, at most `MAX_RANKS`.
            address: Where the rank listens: ``tcp://host:port``, and its public key if it has one.
        """

    @abstractmethod
    def resolve(self, instance: str) -> tuple[Endpoint, ...] | None:
        """The addresses of all ranks of an instance, in order of rank; ``None`` while it is not complete.

        An instance is complete if all of its ranks are registered and agree about their number. May block for a
        moment, for the first answer: a data thread calls it, again and again while a room waits for the instance.

        Raises:
            PeerError: There is no such instance, and waiting will not help.
        """

    @abstractmethod
    def explain(self, instance: str | None) -> tuple[str, str]:
        """Why `resolve` returns ``None``, and a hint what to do; both are empty where that is not known.

        Must not block, because the control thread calls it.

        Args:
            instance: What is not found; with ``None``, this says why others may not find this link.
        """

    @abstractmethod
    def close(self) -> None:
        """End the registration and every thread. May be called twice. May block, for two seconds at most."""
