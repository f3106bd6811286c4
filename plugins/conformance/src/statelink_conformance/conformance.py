"""The test class of ``statelink conform``: every clause, against the backend of the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from statelink_conformance import BackendTests

__all__ = ["ALLOCATOR", "NAME", "OPTIONS", "PATIENCE_VARIABLE", "TestConformance"]

NAME, OPTIONS = "STATELINK_CONFORM_BACKEND", "STATELINK_CONFORM_OPTIONS"
"""Environment variables that name the backend, and give its options as JSON."""
ALLOCATOR = "STATELINK_CONFORM_ALLOCATOR"
"""Environment variable that names the allocator of device memory."""
PATIENCE_VARIABLE = "STATELINK_CONFORM_PATIENCE"
"""Environment variable with the seconds within which a failure must be reported."""


class TestConformance(BackendTests):
    """The whole contract."""

    backend: ClassVar[str] = os.environ.get(NAME, "tcp")
    options: ClassVar[Mapping[str, Any]] = json.loads(os.environ.get(OPTIONS, "{}"))
    allocator: ClassVar[str] = os.environ.get(ALLOCATOR, "")
    patience: ClassVar[float] = float(os.environ.get(PATIENCE_VARIABLE, "30"))
