"""All clauses against a backend of one process that is right; not collected by itself."""

from __future__ import annotations

from statelink_conformance import BackendTests


class TestHonest(BackendTests):
    backend = "honest"
    processes = 1
    patience = 10.0
    deviations = {"test_its_class_is_complete": "this is what a deviation that does not deviate looks like"}


class TestBounded(BackendTests):
    backend = "bounded"
    patience = 10.0
