"""Statelink moves the state of an inference request from a prefill instance to a decode instance.

An engine describes what each rank holds (`statelink.state`), opens a `Link` with `open`, and then calls
`Link.send` and `Sending.push` on prefill, `Link.receive` and `Receiving.accept` on decode. Which transfer library
carries the bytes is one name in the configuration.

A backend author starts with `statelink.backend`; errors are in `statelink.errors`.
"""

from __future__ import annotations

from .backend import hookimpl
from .config import LinkConfig
from .errors import StatelinkError
from .link import Link, Receiving, Rendezvous, Room, Sending, Status, Wanted
from .opening import __version__, open, probe
from .plan import Pages, content_of, indices_of, layer_groups
from .registry import Listed, list_backends
from .wire import Keys

__all__ = [
    "Keys",
    "Link",
    "LinkConfig",
    "Listed",
    "Pages",
    "Receiving",
    "Rendezvous",
    "Room",
    "Sending",
    "StatelinkError",
    "Status",
    "Wanted",
    "__version__",
    "content_of",
    "hookimpl",
    "indices_of",
    "layer_groups",
    "list_backends",
    "open",
    "probe",
]
