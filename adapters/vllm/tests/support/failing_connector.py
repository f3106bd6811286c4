"""vLLM's example of a connector, which keeps state in files, and which can be told to load none of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ExampleConnectorMetadata

__all__ = ["FAILS", "FailingConnector"]

FAILS = "fails"
"""A file of this name beside the stored state: as long as it is there, nothing is loaded, and vLLM is told so."""


class FailingConnector(ExampleConnector):  # type: ignore[misc]  # of an engine without types
    """Says of each block that it should have loaded that it could not, while that file is there."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._failed: set[int] = set()

    def start_load_kv(self, forward_context: Any, **named: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ExampleConnectorMetadata)
        wanted = [request for request in metadata.requests if not request.is_store]
        if wanted and (Path(self._storage_path) / FAILS).exists():
            self._failed = {int(slot) // self._block_size for each in wanted for slot in each.slot_mapping}
            return
        super().start_load_kv(forward_context, **named)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed
