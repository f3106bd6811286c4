"""A plugin of pytest: where vLLM's own tests name no connector, they use Statelink's, and a tiny model."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from typing import Any

OURS: dict[str, Any] = {
    "model": os.environ["STATELINK_TINY_MODEL"],
    "dtype": "float32",
    "kv_connector": "StatelinkConnector",
    "kv_connector_module_path": "statelink_vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"backend": "tcp"},
}


def pytest_configure() -> None:
    utils: Any = importlib.import_module("tests.v1.kv_connector.unit.utils")
    made = utils.create_vllm_config
    given = {name: parameter.default for name, parameter in inspect.signature(made).parameters.items()}
    made.__defaults__ = tuple({**given, **OURS}.values())
    asked = utils.create_request

    @functools.wraps(asked)
    def create_request(*arguments: Any, **named: Any) -> Any:
        """The same, with what a router passes to Statelink's connector."""
        request = asked(*arguments, **named)
        params = request.kv_transfer_params
        if params and params["do_remote_prefill"]:
            params |= {"transfer_id": request.request_id, "peer": ["tcp://127.0.0.1:9"]}
        return request

    utils.create_request = create_request
