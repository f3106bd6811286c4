"""What the adapter uses of vLLM: nothing of the installed one differs, and what could is looked at."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.caches import attention, make_cache
from support.configurations import config_of
from support.newest import OLDER, WHY
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import block_pool

import statelink_vllm
from statelink.errors import ConfigError
from statelink_vllm.connector import SEAM

pytestmark = pytest.mark.smoke

CACHE = make_cache([(attention(4), (0,))]).config


def test_the_installed_vllm_is_one_that_the_adapter_knows() -> None:
    assert SEAM.release() in SEAM.releases
    assert SEAM.differences() == []


@pytest.mark.skipif(OLDER, reason=WHY)
def test_the_command_tells_how_a_release_differs(tmp_path: Path) -> None:
    """``make engine-vllm-differences``, with an unpacked wheel in which nothing but the version differs."""
    (tmp_path / "vllm-0.99.0.dist-info").mkdir()
    (tmp_path / "vllm-0.99.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.0\n")
    command = [sys.executable, "-m", "tools.engine_differences", "vllm", str(tmp_path)]
    root = Path(__file__).parents[3]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    said = "vLLM 0.31, 0.32 or 0.33 is expected; 0.99.0 is installed\n"
    assert (ended.returncode, ended.stdout) == (1, said), ended.stderr


def _without_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(base.KVConnectorBase_V1, "get_transfer_results")


def _with_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(self: Any, blocks: Any, why: str) -> None: ...

    monkeypatch.setattr(block_pool.BlockPool, "touch", touch)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without_a_method, "KVConnectorBase_V1 lacks the methods get_transfer_results"),
        (_with_a_parameter, "BlockPool.touch is defined with 'self blocks why', and is known with 'self blocks'"),
    ],
)
def test_what_differs_is_named(change: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    assert [each for each in SEAM.differences() if said in each.text]


def test_the_class_is_refused_if_something_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_a_method(monkeypatch)
    with pytest.raises(ConfigError, match=r"lacks the methods get_transfer_results"):
        statelink_vllm.StatelinkConnector  # noqa: B018  (the module makes it when it is asked for)


def test_a_release_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.99.0")
    with pytest.raises(ConfigError, match=r"0\.99\.0 is installed(.|\n)*install vLLM 0\.31, 0\.32 or 0\.33") as refused:
        statelink_vllm.StatelinkConnector(config_of(), base.KVConnectorRole.WORKER, CACHE)
    assert "'version' in 'allow'" in refused.value.hint


def test_a_release_that_is_not_known_can_be_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.99.0")
    config = config_of()
    config.kv_transfer_config.kv_connector_extra_config["vllm"] = {"allow": ["version"]}
    with caplog.at_level(logging.WARNING, "vllm.statelink"):
        statelink_vllm.StatelinkConnector(config, base.KVConnectorRole.WORKER, CACHE)
    assert "this vLLM was not tested with Statelink, and 'allow' has 'version'" in caplog.text
    assert "0.99.0 is installed" in caplog.text


def test_another_name_is_no_part_of_the_module() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Connector'"):
        statelink_vllm.Connector  # noqa: B018
