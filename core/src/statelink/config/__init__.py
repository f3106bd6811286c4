"""The configuration of a link, and the sources from which it is read."""

from __future__ import annotations

from ._options import LinkConfig, Staging, read_options
from ._sources import CONFIG_VARIABLE, PREFIX, Given, read_config

__all__ = ["CONFIG_VARIABLE", "PREFIX", "Given", "LinkConfig", "Staging", "read_config", "read_options"]
