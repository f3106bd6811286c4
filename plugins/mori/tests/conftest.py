"""A backend of the real MoRI in this process, connected with one in another. Without MoRI, these tests are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from plugins.mori.tests.world import LAYOUT, REAL, World
from tests.helpers.backend_peer import Memory, Peer, make

from statelink_mori import MoriBackend

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def library() -> None:
    """MoRI is installed. It has to be, if STATELINK_TEST_REQUIRE lists ``mori``."""
    if not REAL:
        problem = "MoRI is not installed: `make conform-mori` runs these tests, and needs CPython 3.10"
        if "mori" in os.environ.get("STATELINK_TEST_REQUIRE", "").split(","):
            pytest.fail(problem, pytrace=False)
        pytest.skip(problem)


@pytest.fixture(scope="module")
def machine(library: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, Path]]:
    folder = tmp_path_factory.mktemp("machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MORI_SIM_HOLD", str(folder / "hold"))
        patch.setenv("MORI_SIM_BREAK", str(folder / "broken"))
        patch.setenv("MORI_SIM_FAULT", str(folder / "fault"))
        yield folder / "hold", folder / "broken", folder / "fault"


@pytest.fixture(scope="module")
def steady(machine: tuple[Path, Path, Path]) -> Iterator[Peer]:
    peer = Peer(MoriBackend, "steady", LAYOUT).ready()
    yield peer
    status, _ = peer.end()  # the real library writes what broke to its output
    assert status == 0


@pytest.fixture
def world(machine: tuple[Path, Path, Path], steady: Peer) -> Iterator[World]:
    backend = make(MoriBackend, "here")
    memory = Memory(LAYOUT)
    memory.arrays[0][:] = 1
    steady.arrays[0][:] = 0
    backend.register(memory.regions)
    backend.connect("steady", steady.descriptor, steady.regions)
    yield World(backend, memory, steady, *machine)
    for path in machine:
        path.unlink(missing_ok=True)
    backend.close()


@pytest.fixture
def mortal(world: World) -> Iterator[Peer]:
    """Another peer, connected, that a test may end."""
    peer = Peer(MoriBackend, "mortal", LAYOUT).ready()
    world.backend.connect("mortal", peer.descriptor, peer.regions)
    yield peer
    peer.kill()
