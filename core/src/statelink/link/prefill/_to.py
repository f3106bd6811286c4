"""The decode instance that a room of prefill is for, where its engine names one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from statelink._arguments import shown
from statelink.errors import ConfigError
from statelink.wire import parse_endpoint

__all__ = ["To", "read_to"]


class To(NamedTuple):
    """The names and keys of the links that may have a room. A link needs only one of them.

    The connection proves a key. Nothing proves a name: every link whose key is allowed can claim it.

    Attributes:
        names: Names of instances.
        keys: Public keys.
    """

    names: frozenset[str]
    keys: frozenset[str]

    def admits(self, instance: str, key: str) -> bool:
        """Whether a link may have the room, given its instance's name and its public key (empty without security)."""
        return instance in self.names or key in self.keys

    def __str__(self) -> str:
        return ", ".join(sorted(self.names | self.keys))


def read_to(given: str | Sequence[str], allowed: Collection[str]) -> To:
    """Read the ``to`` that an engine passed.

    Args:
        given: The name of an instance, a public key, an address with a public key, or several of them.
        allowed: The public keys that this link allows. A text that equals one of them is a key; other texts are names.

    Raises:
        ConfigError: It is none of these, or the address has a key that is not allowed.
    """
    texts = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Sequence) else ()
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(
            f"a room is for {shown(given)}",
            cause="the name of a decode instance, a public key, or several of them are expected",
            code="config.to",
        )
    keys = {parse_endpoint(text).key if text.startswith("tcp://") else text for text in texts}
    names = keys - set(allowed)
    wrong = [text for text in texts if text.startswith("tcp://") and parse_endpoint(text).key in names]
    if wrong:
        raise ConfigError(
            f"a room is for {wrong[0]!r}",
            cause="the address has a public key that this link does not allow"
            if "@" in wrong[0]
            else "an address without a public key does not say who may have the room",
            hint="pass the name of the decode instance, or the public keys of its ranks",
            code="config.to",
        )
    return To(frozenset(names), frozenset(keys - names))
