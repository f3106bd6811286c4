"""The backend keeps its contract, over the library where it can run, and over its simulator elsewhere."""

from __future__ import annotations

from tests.helpers.availability import OPTIONS, environment_of

from statelink.testing import BackendTests


class TestAscend(BackendTests):
    backend = "ascend"
    options = OPTIONS["ascend"]
    environment = environment_of("ascend")
    simulator = bool(environment)
