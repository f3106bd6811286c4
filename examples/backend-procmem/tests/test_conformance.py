"""The backend keeps its contract, and its package is complete."""

from __future__ import annotations

from statelink_conformance import BackendTests, PackageTests


class TestProcmemBackend(BackendTests):
    backend = "procmem"


class TestPackage(PackageTests):
    backend = "procmem"
    library = ()  # modules of your library that are imported late, such as ("vendor",)
