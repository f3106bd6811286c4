"""Tells the ecosystem's own libraries what a link does: Prometheus, OpenTelemetry, and logs.

The option ``telemetry`` names what is wanted, with its options. Each is a class that subclasses `Observer`, found in
the entry-point group ``statelink.telemetry``, so that a package can bring another. What is not named is neither
imported nor called.
"""

from __future__ import annotations

from ._attach import attach, prepare
from ._observer import Observer, RoomObserver

__all__ = ["Observer", "RoomObserver", "attach", "prepare"]
