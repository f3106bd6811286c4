"""What ``statelink conform`` runs: every clause, against the backend that the command line names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from statelink.testing import BackendTests

__all__ = ["ALLOCATOR", "NAME", "OPTIONS", "PATIENCE", "TestConformance"]

NAME, OPTIONS = "STATELINK_CONFORM_BACKEND", "STATELINK_CONFORM_OPTIONS"
"""Environment variables that name the backend, and give its options as JSON."""
ALLOCATOR = "STATELINK_CONFORM_ALLOCATOR"
"""That which names what allocates memory of a device."""
PATIENCE = "STATELINK_CONFORM_PATIENCE"
"""That which has the seconds within which a failure has to show."""


class TestConformance(BackendTests):
    """The whole contract."""

    backend: ClassVar[str] = os.environ.get(NAME, "tcp")
    options: ClassVar[Mapping[str, Any]] = json.loads(os.environ.get(OPTIONS, "{}"))
    allocator: ClassVar[str] = os.environ.get(ALLOCATOR, "")
    patience: ClassVar[float] = float(os.environ.get(PATIENCE, "30"))
