"""The connector on a device that is behind: what a layer writes to the cache is there only later, in order."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch
from late_device import Device
from vllm.forward_context import get_forward_context

from statelink_vllm.connector import StatelinkConnector, WorkerSide

__all__ = ["ForgetfulConnector", "LateConnector"]

LATE_SECONDS = 0.02
"""By how much a layer is later than the one before it."""


class LateConnector(StatelinkConnector):
    """The pages that a layer has written have NaN instead, until the device comes to it."""

    forgets = False

    def register_kv_caches(self, kv_caches: Any) -> None:
        self._late = Device()
        made = WorkerSide.__init__

        def behind(
            side: Any, config: Any, inventory: Any, groups: Any, leftovers: Any, ready: Any, number: Any
        ) -> None:
            made(side, config, inventory, groups, leftovers, self._event, number)

        with mock.patch.object(WorkerSide, "__init__", behind):
            super().register_kv_caches(kv_caches)

    def _event(self) -> Any:
        event = self._late.Event()
        event.record()
        return None if self.forgets else event

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        before = self._late.Event()  # a step reads what the one before it has written
        before.record()
        before.synchronize()
        super().bind_connector_metadata(connector_metadata)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        slots = get_forward_context().slot_mapping[layer_name]
        blocks = torch.unique(slots[slots >= 0] // self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        written = kv_layer[blocks].clone()
        kv_layer[blocks] = float("nan")

        def land() -> None:
            time.sleep(LATE_SECONDS)
            kv_layer[blocks] = written

        self._late.current.launch(land)
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)


class ForgetfulConnector(LateConnector):
    """No event says when it is there."""

    forgets = True
