"""A package in which nothing is as it should be, but for what its backend moves."""

from __future__ import annotations

import atexit
from typing import Any

from statelink import tcp
from statelink.backend import BackendContext, Probe


class Options(tcp.Options, frozen=True, kw_only=True):
    speed: int = 1


class Untidy(tcp.TcpBackend):
    """Does not care whether its library is there, or what it does when the process ends."""

    name = "untidy"
    Options = Options

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        atexit.register(print, "a thread of the library is still running")

    @classmethod
    def probe(cls, options: Any) -> Probe:
        print("looking for the library")
        return Probe(ok=True, reason="all is well")
