"""Processes of these tests, in which MemFabric can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from plugins.ascend.tests import library as found
from plugins.ascend.tests.peer import MIB, Peer

Make = Callable[..., Peer]


@pytest.fixture(scope="session")
def library() -> dict[str, str]:
    """What a process needs in its environment; nothing where there is an NPU."""
    return found.environment()


@pytest.fixture(scope="session")
def standin(library: dict[str, str]) -> None:
    """For a test that has an NPU fail, or take it away, which only the stand-in for its driver does at will."""
    if not library:
        pytest.skip("here is an NPU, which does not fail at will")


@pytest.fixture(scope="session")
def pool() -> Iterator[list[Peer]]:
    """Processes that tests have done with, and others can use."""
    peers: list[Peer] = []
    yield peers
    for peer in peers:
        peer.kill()


def making(library: dict[str, str], pool: list[Peer]) -> Iterator[Make]:
    made: list[Peer] = []

    def make(name: str, sizes: Sequence[int] = (MIB,), kind: str = "npu:0") -> Peer:
        fits = [peer for peer in pool if peer.key == (tuple(sizes), kind)]
        if fits:
            pool.remove(fits[0])
        peer = fits[0] if fits else Peer(name, sizes, kind, library, found.allocator())
        peer.link = name
        made.append(peer)
        return peer

    yield make
    for peer in made:
        pool += [peer] if peer.clean() else []


@pytest.fixture
def make(library: dict[str, str], pool: list[Peer]) -> Iterator[Make]:
    """Processes for one test."""
    yield from making(library, pool)


@pytest.fixture(scope="module")
def make_shared(library: dict[str, str], pool: list[Peer]) -> Iterator[Make]:
    """Processes for all tests of a module."""
    yield from making(library, pool)
