"""Runs pytest in a process that cannot call ZeroMQ's C library directly, so that pyzmq's own calls are used."""

from __future__ import annotations

import ctypes
import sys
from typing import Any
from unittest.mock import patch

import pytest

refused: list[str] = []
real = ctypes.PyDLL


def library(name: str | None, **named: Any) -> ctypes.PyDLL:
    if name is None:
        return real(name, **named)
    refused.append(name)
    raise OSError(f"{name} cannot be loaded")


if __name__ == "__main__":
    with patch.object(ctypes, "PyDLL", library):
        import statelink.wire  # noqa: F401
    assert refused, "the C library behind pyzmq was not asked for"
    sys.exit(pytest.main(sys.argv[1:]))
