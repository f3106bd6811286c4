"""A plugin that imports its library at once, and does not look at what that raises."""

from __future__ import annotations

import importlib

from statelink.tcp import TcpBackend

__all__ = ["Eager"]

vendor = importlib.import_module("vendor")


class Eager(TcpBackend):
    name = "eager"
