"""Processes and nodes for the tests of the embedded backend."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from .common import POISON, SPACE
from .node import Node
from .remote import Remote


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[Remote, Remote]]:
    """A source and a destination, each in a process of its own, shared by all tests that leave them intact."""
    pair = Remote(SPACE), Remote(SPACE)
    yield pair
    for remote in pair:
        remote.kill()


@pytest.fixture
def source(processes: tuple[Remote, Remote]) -> Iterator[Remote]:
    yield processes[0]
    processes[0].do("close_all")


@pytest.fixture
def target(processes: tuple[Remote, Remote]) -> Iterator[Remote]:
    processes[1].memory[:] = POISON
    yield processes[1]
    processes[1].do("close_all")


@pytest.fixture
def here() -> Iterator[Node]:
    """A node in the test's own process."""
    node = Node(np.full(4 << 20, POISON, np.uint8))
    yield node
    node.close_all()
