"""Requests that a router sends to prefill again, because the answer to its first attempt was lost.

Nobody asks for the state of the first attempt, and prefill would hold its blocks until the ``deadline``. A router sends
the same request under the same id, and vLLM adds random digits of its own to the id of each.
"""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

from vllm import envs

__all__ = ["Repeats"]

RANDOM = re.compile("(.+)-[0-9a-f]{8}", re.DOTALL)
"""An id of vLLM's: the client's, and vLLM's random digits."""


class _Attempt(NamedTuple):
    """A request whose state waits for decode.

    Attributes:
        name: vLLM's id.
        number: Its place in the order in which requests arrived.
    """

    name: str
    number: int


class Repeats:
    """Knows the latest attempt of each request whose state waits for decode. Runs on the thread of the engine core."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._arrived: dict[str, int] = {}
        """The places of requests that are computed, by vLLM's id."""
        self._latest: dict[tuple[str, bytes], _Attempt] = {}
        """The latest attempt, by what all attempts of a request have in common: the client's id, and the content."""
        self._keys: dict[str, tuple[str, bytes]] = {}

    def arrived(self, name: str) -> None:
        """A request has arrived whose state will wait for decode, under a room that no router knows yet."""
        self._arrived.setdefault(name, next(self._numbers))

    def computed(self, name: str, content: bytes) -> str:
        """The state of such a request begins to wait.

        Args:
            name: vLLM's id.
            content: Which request it is. Requests with different prompts are no attempts of one.

        Returns:
            The attempt whose state nobody will ask for, by vLLM's id: an earlier one, or this one, if a later one was
            computed first. Empty if there is none.
        """
        number = self._arrived.pop(name, None)
        read = RANDOM.fullmatch(name)
        if number is None or read is None or envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
            return ""
        key = read[1], content
        other = self._latest.get(key)
        if other is not None and other.number > number:
            return name
        if other is not None:
            del self._keys[other.name]
        self._latest[key], self._keys[name] = _Attempt(name, number), key
        return "" if other is None else other.name

    def ended(self, name: str) -> None:
        """Nothing of a request waits any longer."""
        self._arrived.pop(name, None)
        key = self._keys.pop(name, None)
        if key is not None:
            del self._latest[key]

    def __bool__(self) -> bool:
        """Whether any request is known."""
        return bool(self._arrived) or bool(self._latest)
