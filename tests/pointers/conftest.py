"""A backend that takes memory of devices, so that links over made-up kinds open as far as they should."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from statelink.registry import load_backend

if TYPE_CHECKING:
    from statelink.backend import Backend


@pytest.fixture
def broad(monkeypatch: pytest.MonkeyPatch) -> type[Backend]:
    """The embedded backend, as if it declared every kind of memory."""
    kind = load_backend("tcp")
    kinds = frozenset({"dram", "cuda", "npu"})
    monkeypatch.setattr(kind, "capabilities", dataclasses.replace(kind.capabilities, memory_kinds=kinds))
    return kind


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment of the tests says of allocators."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
