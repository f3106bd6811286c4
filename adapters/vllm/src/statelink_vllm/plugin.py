"""Makes the name of the connector known in every process of vLLM, as an entry point of its plugins.

vLLM finds a connector by the module that a configuration names. Some of its processes look it up by its name alone: an
API server whose engines have several connectors at once (``MultiConnector``), to read what they counted. NVIDIA Dynamo
has a table of such names of its own.
"""

from __future__ import annotations

import contextlib

from . import _dynamo

__all__ = ["register"]

NAME = "StatelinkConnector"


def register() -> None:
    """Register the connector with vLLM, and with Dynamo if this is a worker of it.

    Does nothing if it is registered; imports neither Statelink nor a backend.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # that is how vLLM says that it has the name
        KVConnectorFactory.register_connector(NAME, "statelink_vllm", NAME)
    _dynamo.introduce(NAME)
