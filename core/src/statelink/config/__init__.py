"""What an engine configures of a link, and where a configuration is read from."""

from __future__ import annotations

from ._options import LinkConfig, Staging, read_options
from ._sources import Given, read_config

__all__ = ["Given", "LinkConfig", "Staging", "read_config", "read_options"]
