"""The fixtures of the clauses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from statelink.backend._interface import cannot_register
from statelink.config import read_options
from statelink.errors import BackendError

from . import _inside
from ._bench import Subject
from ._lab import Lab
from ._workers import Pool, Worker

__all__ = ["memory_of", "statelink_lab", "statelink_pool", "statelink_pools", "subject", "untested"]

CHOOSE = "say what memory to move: `memory` in the test class, --statelink-memory for pytest, --memory for conform"


def memory_of(config: pytest.Config, suite: Any) -> str:
    """Kind of the memory that a test class moves: from the command line, or else from the class."""
    return str(config.getoption("statelink_memory") or suite.memory)


def untested(suite: Any, memory: str) -> list[str]:
    """Kinds of memory that a backend declares and can register, beside the one that a test class moves."""
    try:
        kind = _inside.kind_of(suite.backend)
        options = read_options(kind.Options, suite.options, f"options of backend {suite.backend!r}")
        others = sorted(kind.capabilities.memory_kinds - {memory.partition(":")[0]})
        return [each for each in others if not cannot_register(kind, options, each)]
    except Exception:  # a clause reports this
        return []


@pytest.fixture(scope="session")
def statelink_pools() -> Iterator[dict[Any, Pool]]:
    """Worker processes of all backends, by what they have in common."""
    pools: dict[Any, Pool] = {}
    yield pools
    for pool in pools.values():
        pool.end()


@pytest.fixture(scope="class")
def statelink_pool(request: pytest.FixtureRequest, statelink_pools: dict[Any, Pool]) -> Pool:
    suite = request.cls
    try:
        home = _inside.kind_of(suite.backend).__module__.partition(".")[0]
    except BackendError:
        home = suite.backend
    memory = memory_of(request.config, suite), suite.allocator
    key = (home, *memory, *sorted(suite.environment.items()))
    if key not in statelink_pools:
        statelink_pools[key] = Pool(suite.environment, 2 * suite.patience + 30, memory)
    return statelink_pools[key]


@pytest.fixture(scope="class")
def subject(request: pytest.FixtureRequest, statelink_pool: Pool) -> Subject:
    """The backend. It can run here; otherwise the clause is skipped."""
    suite = request.cls
    listed = {each.strip() for each in os.environ.get("STATELINK_TEST_REQUIRE", "").split(",")}
    required = request.config.getoption("statelink_require") or suite.backend in listed
    memory = memory_of(request.config, suite)
    taken: list[Worker] = []
    try:
        kind = _inside.kind_of(suite.backend)
        options = read_options(kind.Options, suite.options, f"options of backend {suite.backend!r}")
        cause = cannot_register(kind, options, memory)
        if cause:
            what = f"backend {suite.backend!r} cannot register memory of kind {memory!r}: {cause}"
            pytest.fail(f"{what}\nhint: {CHOOSE}", pytrace=False)
        taken.append(statelink_pool.take())
        ok, reason, hint = taken[0](_inside.probe, suite.backend, dict(suite.options))
        problem = "" if ok else f"{reason}; {hint}".rstrip("; ")
    except BackendError as error:
        problem = str(error)
    finally:
        statelink_pool.give_back(taken)
    if problem and required:
        pytest.fail(f"backend {suite.backend} is required, and cannot run here: {problem}", pytrace=False)
    if problem:
        pytest.skip(f"backend {suite.backend} cannot run here: {problem}")
    pages = getattr(suite, "state_type", "kv")
    return Subject(suite.backend, kind, dict(suite.options), suite.patience, memory, dict(suite.config), pages)


@pytest.fixture(scope="class")
def statelink_lab(request: pytest.FixtureRequest, subject: Subject, statelink_pool: Pool) -> Iterator[Lab]:
    lab = Lab(subject, statelink_pool, request.cls.processes)
    yield lab
    lab.spoil()
