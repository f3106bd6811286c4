"""The backend keeps its contract, over the library where it can run, and over its simulator elsewhere."""

from __future__ import annotations

from tests.helpers.availability import environment_of

from statelink.testing import BackendTests


class TestMori(BackendTests):
    backend = "mori"
    environment = environment_of("mori")
    simulator = bool(environment)
