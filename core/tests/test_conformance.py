"""The embedded backend keeps its contract, in both of the ways in which it moves bytes."""

from __future__ import annotations

from statelink_conformance import BackendTests


class TestTcp(BackendTests):
    backend = "tcp"
    moved_by = "the core, by copies from process to process"


class TestTcpSockets(BackendTests):
    backend = "tcp"
    moved_by = "the core, through sockets"
    options = {"same_host_copy": False, "stall_timeout": 2.0, "connect_timeout": 2.0}
    still = 3.0  # so that a stall is seen
