"""Finds the addresses of an instance's ranks by the name of the instance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeGuard, runtime_checkable

from statelink.errors import PeerError
from statelink.wire import Endpoint, parse_endpoint

__all__ = ["Explaining", "Naming", "Peer", "Rendezvous", "StaticRendezvous", "find_siblings"]

Peer = str | Sequence[str]
"""What a router hands to decode: an instance's name, one address, or the addresses of all of its ranks."""


class Rendezvous(Protocol):
    """Where instances are found. Methods may block; the core calls them on a data thread."""

    def resolve(self, peer: Peer) -> tuple[Endpoint, ...] | None:
        """The addresses of all ranks of an instance, or ``None`` while it is not complete.

        Raises:
            PeerError: There is no such instance, and waiting will not help.
        """

    def close(self) -> None:
        """Release what it holds. May be called twice."""


@runtime_checkable
class Explaining(Protocol):
    """What a `Rendezvous` may offer besides: it can say why it does not find an instance."""

    def explain(self, peer: Peer | None) -> tuple[str, str]:
        """Why `Rendezvous.resolve` returns ``None``, and a hint what to do; both are empty where that is not known.

        Must not block: it is called on the control thread.

        Args:
            peer: The instance that is not found; with ``None``, this says why others may not find this link.
        """


@runtime_checkable
class Naming(Protocol):
    """What a `Rendezvous` may offer besides: it knows instances by the names under which their ranks registered."""

    def names(self, peer: Peer) -> bool:
        """Whether ``peer`` is such a name, so that a process of another name is not of that instance.

        Must not block: it is called on the control thread.
        """


def find_siblings(rendezvous: Rendezvous, instance: str, own: Endpoint) -> list[str] | None:
    """Addresses of the other ranks of a link's own instance; ``None`` while the rendezvous lacks some.

    Blocks; data threads only.

    Args:
        rendezvous: Where the ranks are registered.
        instance: The name of the link's instance.
        own: The link's own address.
    """
    ranks = rendezvous.resolve(instance)
    return None if ranks is None else [str(each) for each in ranks if each != own]


class StaticRendezvous:
    """Addresses from the configuration. Thread-safe, never blocks.

    Args:
        peers: Instance name to the addresses of its ranks.
    """

    def __init__(self, peers: Mapping[str, Sequence[str]]) -> None:
        self._peers = {name: tuple(map(parse_endpoint, addresses)) for name, addresses in peers.items()}

    def lacks(self, peer: Peer) -> TypeGuard[str]:
        """Whether ``peer`` is the name of an instance that is not configured."""
        return isinstance(peer, str) and not peer.startswith("tcp://") and peer not in self._peers

    def resolve(self, peer: Peer) -> tuple[Endpoint, ...] | None:
        """See `Rendezvous.resolve`. Given addresses, it returns these."""
        if not isinstance(peer, str):
            return tuple(map(parse_endpoint, peer))
        if peer.startswith("tcp://"):
            return tuple(map(parse_endpoint, peer.split(",")))
        known = self._peers.get(peer)
        if known is None:
            raise PeerError(
                f"no instance named {peer!r}",
                cause=f"configured peers: {', '.join(sorted(self._peers)) or 'none'}",
                hint="add it to 'peers', or pass its addresses (tcp://host:port, one a rank)",
                code="peer.unknown",
            )
        return known

    def close(self) -> None:
        """Nothing to release."""
