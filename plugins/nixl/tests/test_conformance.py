"""The backend keeps its contract, over what UCX chooses on one host, and over TCP."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from statelink.testing import BackendTests

SOCKETS = "NIXL keeps a socket or two of every remote agent that was removed, until its own agent is destroyed"


class TestNixl(BackendTests):
    backend = "nixl"
    moved_by = f"NIXL {version('nixl')}, over UCX"
    deviations = {
        "test_connecting_often_leaves_nothing_behind": SOCKETS,
        "test_connecting_again_leaves_nothing_behind": SOCKETS,
        "test_connecting_a_thousand_times_leaves_nothing_behind": SOCKETS,
    }


@pytest.mark.soak
class TestNixlTcp(TestNixl):
    options = {"ucx": {"TLS": "tcp"}}
