"""The backend keeps its contract, over what UCX chooses on one host, and over TCP."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from statelink_conformance import BackendTests


class TestNixl(BackendTests):
    backend = "nixl"
    moved_by = f"NIXL {version('nixl')}, over UCX"


@pytest.mark.soak
class TestNixlTcp(TestNixl):
    options = {"ucx": {"TLS": "tcp"}}
