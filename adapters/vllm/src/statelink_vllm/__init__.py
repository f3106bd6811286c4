"""Makes Statelink a KV connector of vLLM.

vLLM imports this module by the name in ``kv_connector_module_path``, and takes `StatelinkConnector` from it, in its API
server, in its engine core and in each worker. The class is made at that moment, and only if the installed vLLM is the
one that the adapter was tested with. Nothing of vLLM is imported before.
"""

from __future__ import annotations

from typing import Any

__all__ = ["StatelinkConnector"]


def __getattr__(name: str) -> Any:
    if name != "StatelinkConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._seam import check_installed

    check_installed()
    from ._connector import StatelinkConnector

    return StatelinkConnector
