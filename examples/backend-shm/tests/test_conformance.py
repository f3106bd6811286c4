"""The backend keeps its contract, and its package is complete."""

from __future__ import annotations

from statelink_conformance import BackendTests, PackageTests


class TestShmBackend(BackendTests):
    backend = "shm"


class TestPackage(PackageTests):
    backend = "shm"
    library = ()  # modules of your library that are imported late, such as ("vendor",)
