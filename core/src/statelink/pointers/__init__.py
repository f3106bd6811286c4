"""What the platform knows about memory: the process's memory map, loaded drivers, and settings of allocators."""

from __future__ import annotations

from ._allocators import LOCKED, lockable, pinned, segments
from ._check import Checked, check
from ._map import read_map
from ._platform import Platform, Reader
from ._settings import device_settings, hint_at_settings, on_disk

__all__ = [
    "LOCKED",
    "Checked",
    "Platform",
    "Reader",
    "check",
    "device_settings",
    "hint_at_settings",
    "lockable",
    "on_disk",
    "pinned",
    "read_map",
    "segments",
]
