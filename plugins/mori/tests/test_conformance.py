"""The backend keeps its contract, over the library where it is installed, and over its simulator elsewhere."""

from __future__ import annotations

from importlib.metadata import version

from plugins.mori.tests.world import REAL, STAND_IN
from tests.helpers.availability import environment_of

from statelink.testing import BackendTests

CARD = "a stand-in for libibverbs" if STAND_IN else "a network card"


class TestMori(BackendTests):
    backend = "mori"
    environment = {} if REAL else environment_of("mori")
    simulator = bool(environment)
    moved_by = "its simulator" if simulator else f"MoRI {version('amd-mori')}, over {CARD}"
