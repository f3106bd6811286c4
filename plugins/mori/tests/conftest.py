"""The library to test with: whatever ``mori`` is importable, or the simulator where none is."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from plugins.mori.tests.world import LAYOUT, REAL, World
from tests.helpers.backend_peer import Memory, Peer, make

from statelink_mori import MoriBackend

SIMULATOR = Path(__file__).parents[1] / "simulator"


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    """The simulator is importable as long as the tests of one module run, if no real library is installed."""
    if REAL:
        yield
        return
    sys.path.append(str(SIMULATOR))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(SIMULATOR))
        for name in [name for name in sys.modules if name.partition(".")[0] == "mori"]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, Path]]:
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
