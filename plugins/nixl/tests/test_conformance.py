"""The backend keeps its contract, over what UCX chooses on one host, and over TCP."""

from __future__ import annotations

import pytest

from statelink.testing import BackendTests


class TestNixl(BackendTests):
    backend = "nixl"


@pytest.mark.soak
class TestNixlTcp(TestNixl):
    options = {"ucx": {"TLS": "tcp"}}
