"""The backend keeps its contract, over the library. Where that is not installed, the clauses are skipped."""

from __future__ import annotations

from importlib.metadata import version

from plugins.mori.tests.world import REAL, STAND_IN

from statelink_conformance import BackendTests

CARD = "a stand-in for libibverbs" if STAND_IN else "a network card"


class TestMori(BackendTests):
    backend = "mori"
    moved_by = f"MoRI {version('amd-mori')}, over {CARD}" if REAL else ""
