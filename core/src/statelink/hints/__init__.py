"""Hints of errors: the name that was nearly right, and the command that installs a package."""

from __future__ import annotations

from ._install import install_hint
from ._nearest import did_you_mean

__all__ = ["did_you_mean", "install_hint"]
