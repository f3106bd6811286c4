"""What the platform knows of memory: the process's map, the drivers that it has loaded, the allocators' settings."""

from __future__ import annotations

from ._allocators import LOCKED, segments
from ._check import Checked, check
from ._platform import Platform
from ._settings import device_settings, explained

__all__ = ["LOCKED", "Checked", "Platform", "check", "device_settings", "explained", "segments"]
