"""Processes and nodes for the tests of the embedded backend."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from .common import POISON, SPACE
from .node import Node
from .remote import Remote, make_file


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
    path = make_file(4 << 20)
    node = Node(path)
    node.memory[:] = POISON
    os.unlink(path)
    yield node
    node.close_all()
