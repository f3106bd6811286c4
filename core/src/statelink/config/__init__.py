"""The configuration of a link, and the sources from which it is read."""

from __future__ import annotations

from ._options import Etcd, LinkConfig, Staging, read_options
from ._sources import CONFIG_VARIABLE, PREFIX, Given, read_config

__all__ = ["CONFIG_VARIABLE", "PREFIX", "Etcd", "Given", "LinkConfig", "Staging", "read_config", "read_options"]
