"""All clauses against a backend whose library is imported late, and reports later; not collected by itself."""

from __future__ import annotations

from statelink_conformance import BackendTests, PackageTests


class TestQueue(BackendTests):
    backend = "queue"
    processes = 1
    patience = 10.0


class TestQueuePackage(PackageTests):
    backend = "queue"
    library = ("vendor",)
    refused_options = [{"depth": 0}, {"depth": 2.5}]
