"""Makes the name of the connector known to NVIDIA Dynamo's worker for vLLM.

Dynamo writes the ``kv_transfer_params`` of each request itself. It has a table of connectors, and refuses every request
if the table lacks vLLM's connector. Statelink's needs what Dynamo does for NIXL's: prefill is asked with
``do_remote_decode``, and decode gets prefill's answer as it is.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["introduce"]

log = logging.getLogger("vllm.statelink")

TABLE = "dynamo.vllm.kv_connector_protocols"


def introduce(name: str) -> None:
    """Add the connector to Dynamo's table, if this process has imported it. Imports nothing, and never raises.

    Dynamo imports its table before it parses vLLM's options, and vLLM loads its plugins while they are parsed. The
    processes of the engine have no table, and need none.
    """
    table = sys.modules.get(TABLE)
    if table is None:
        return
    try:
        table.KV_CONNECTOR_PROTOCOLS.setdefault(name, table.NixlConnectorProtocol)
    except Exception as error:
        log.warning(
            "this Dynamo cannot be told of %s, and will refuse every request: %s: %s\n"
            "hint: install the Dynamo that statelink-vllm was tested with; see docs/dynamo.md",
            name,
            type(error).__name__,
            error,
        )
