"""The check of the installed vLLM: nothing differs, and every kind of difference is found and named."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1 import outputs
from vllm.v1.core import block_pool

import statelink_vllm
from statelink.errors import ConfigError
from statelink_vllm.connector import differences

pytestmark = pytest.mark.smoke


def test_the_installed_vllm_is_the_tested_one() -> None:
    assert differences() == []


@pytest.mark.parametrize("found", ["0.33.0+cpu", "0.33.0+cu130"])
def test_a_build_for_another_device_is_the_same_version(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: found)
    assert differences() == []


def test_another_version_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.33.1")
    assert differences() == ["vLLM 0.33.0 is expected; 0.33.1 is installed"]


def test_the_command_tells_how_a_release_differs(tmp_path: Path) -> None:
    """``make engine-vllm-differences``, with an unpacked wheel in which nothing but the version differs."""
    (tmp_path / "vllm-0.34.0.dist-info").mkdir()
    (tmp_path / "vllm-0.34.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.34.0\n")
    command = [sys.executable, "-m", "tools.engine_differences", "vllm", str(tmp_path)]
    root = Path(__file__).parents[3]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (1, "vLLM 0.33.0 is expected; 0.34.0 is installed\n"), ended.stderr


def _without_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(base.KVConnectorBase_V1, "get_transfer_results")


def _with_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base.KVConnectorBase_V1, "save_twice", lambda self: None, raising=False)


def _with_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(self: Any, blocks: Any, why: str) -> None: ...

    monkeypatch.setattr(block_pool.BlockPool, "touch", touch)


def _with_parameters_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def finished(self: Any, block_ids: Any, request: Any) -> None: ...

    monkeypatch.setattr(base.KVConnectorBase_V1, "request_finished", finished)


def _with_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    larger = dataclasses.make_dataclass("KVConnectorOutput", [("fresh", int, 0)], bases=(outputs.KVConnectorOutput,))
    monkeypatch.setattr(outputs, "KVConnectorOutput", larger)


def _without_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(base, "SupportsHMA")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without_a_method, "KVConnectorBase_V1 lacks the methods get_transfer_results"),
        (_with_a_method, "KVConnectorBase_V1 has the methods save_twice, which are not known"),
        (_with_a_parameter, "BlockPool.touch has the parameters why, which are not known"),
        (_with_parameters_in_another_order, "request_finished has its parameters in another order"),
        (_with_a_field, "KVConnectorOutput has the fields fresh, which are not known"),
        (_without_a_class, "SupportsHMA is missing"),
    ],
)
def test_every_kind_of_difference_is_named(change: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    assert [each for each in differences() if said in each]


def test_the_class_is_refused_with_the_list_of_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.34.0")
    with pytest.raises(ConfigError, match=r"0\.34\.0 is installed(.|\n)*install vllm==0\.33\.0"):
        statelink_vllm.StatelinkConnector  # noqa: B018  (the module makes it when it is asked for)


def test_another_name_is_no_part_of_the_module() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Connector'"):
        statelink_vllm.Connector  # noqa: B018
