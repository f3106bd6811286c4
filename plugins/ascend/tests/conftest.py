"""Processes of these tests, in which MemFabric can be imported: its simulator, where the library cannot run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from plugins.ascend.tests.peer import MIB, Peer
from tests.helpers.availability import environment_of

Make = Callable[..., Peer]


@pytest.fixture(scope="session")
def library() -> dict[str, str]:
    """What a process needs in its environment; nothing where the library itself can run."""
    return environment_of("ascend", "npu:0")


@pytest.fixture(scope="session")
def simulated(library: dict[str, str]) -> None:
    """For a test that has the library fail, which only its simulator does at will."""
    if not library:
        pytest.skip("here is an NPU, whose library does not fail at will")


@pytest.fixture(scope="session")
def pool() -> Iterator[list[Peer]]:
    """Processes that tests have done with, and others can use."""
    peers: list[Peer] = []
    yield peers
    for peer in peers:
        peer.kill()


def making(library: dict[str, str], pool: list[Peer]) -> Iterator[Make]:
    made: list[Peer] = []

    def make(name: str, sizes: Sequence[int] = (MIB,), kind: str = "npu:0", **settings: str) -> Peer:
        fits = [peer for peer in pool if peer.key == (tuple(sizes), kind) and not settings]
        if fits:
            pool.remove(fits[0])
        allocator = "npu_memory:Memory" if library else ""
        peer = fits[0] if fits else Peer(name, sizes, kind, library | settings, allocator)
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
