"""Makes Statelink a KV connector of vLLM.

vLLM takes `StatelinkConnector` from this module, in its API server, in its engine core and in each worker. It knows the
module from its plugins, or by the name in ``kv_connector_module_path``. The class is made at that moment, and only if
the installed vLLM has all that the adapter needs. Nothing of vLLM is imported before. `AnswerAtOnce` is a middleware
for its API server, which the option ``--middleware`` names.
"""

from __future__ import annotations

from typing import Any

__all__ = ["AnswerAtOnce", "StatelinkConnector"]


def __getattr__(name: str) -> Any:
    if name == "AnswerAtOnce":
        from ._at_once import AnswerAtOnce

        return AnswerAtOnce
    if name != "StatelinkConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._seam import SEAM

    SEAM.check(allowed=True)  # the class itself knows what the operator allows
    from ._connector import StatelinkConnector
    from .plugin import register

    register()  # VLLM_PLUGINS may leave the entry point out
    return StatelinkConnector
