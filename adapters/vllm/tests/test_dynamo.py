"""The name of the connector in NVIDIA Dynamo's table. A module stands in for it; adapters/dynamo has the real one."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest

from statelink_vllm.plugin import register

pytestmark = pytest.mark.smoke

TABLE = "dynamo.vllm.kv_connector_protocols"
CONNECTOR = "StatelinkConnector"


def stand_in(monkeypatch: pytest.MonkeyPatch, **names: Any) -> types.ModuleType:
    """The module of Dynamo's table, as if a worker of Dynamo had imported it."""
    module = types.ModuleType(TABLE)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, TABLE, module)
    return module


def test_the_connector_is_asked_as_nixls(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nixl:
        """Dynamo's class for NIXL's connector."""

    table = stand_in(monkeypatch, KV_CONNECTOR_PROTOCOLS={"NixlConnector": Nixl}, NixlConnectorProtocol=Nixl)
    for _ in range(2):  # vLLM may load its plugins twice
        register()
    assert {"NixlConnector": Nixl, CONNECTOR: Nixl} == table.KV_CONNECTOR_PROTOCOLS


def test_an_entry_that_dynamo_has_itself_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own:
        """Dynamo's own class for this connector."""

    table = stand_in(monkeypatch, KV_CONNECTOR_PROTOCOLS={CONNECTOR: Own}, NixlConnectorProtocol=object)
    register()
    assert {CONNECTOR: Own} == table.KV_CONNECTOR_PROTOCOLS


def test_a_table_of_another_kind_is_named_and_nothing_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch, PROTOCOLS={})
    with caplog.at_level(logging.WARNING, "statelink.vllm"):
        register()
    (line,) = caplog.messages
    assert "KV_CONNECTOR_PROTOCOLS" in line
    assert "hint: install the Dynamo" in line


def test_without_dynamo_nothing_is_said_and_nothing_imported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, TABLE, raising=False)
    with caplog.at_level(logging.DEBUG):
        register()
    assert not caplog.messages
    assert "dynamo" not in sys.modules
