"""The names of both adapters in Dynamo's own processes, without a fleet."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from support.fleets import ENGINES

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.smoke

TABLE = """
import json, sys
from types import SimpleNamespace
from dynamo.vllm.kv_connector_protocols import make_kv_connector_protocol
from vllm.plugins import load_general_plugins
load_general_plugins()
extra = {"connectors": [{"kv_connector": name} for name in ("StatelinkConnector", "OffloadingConnector")]}
for name in ("StatelinkConnector", "MultiConnector"):
    given = SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra if name == "MultiConnector" else {})
    protocol = make_kv_connector_protocol(SimpleNamespace(kv_transfer_config=given))
    print("SAID", json.dumps(protocol.prefill_request_kv_transfer_params()))
"""

ASKED = """
import json
from types import SimpleNamespace
from dynamo.vllm.handlers import PrefillWorkerHandler
from vllm import SamplingParams
from vllm.plugins import load_general_plugins
load_general_plugins()
config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="StatelinkConnector"))
worker = SimpleNamespace(engine_client=SimpleNamespace(vllm_config=config))
asked = SamplingParams(extra_args={"kv_transfer_params": {"do_remote_prefill": True, "room": "7", "generated": 3}})
PrefillWorkerHandler._prefill_kv_protocol(worker, False, asked)
print("SAID", json.dumps(asked.extra_args["kv_transfer_params"]))
"""

PARSED = """
import asyncio, sys
from dynamo.sglang.args import parse_args
found = asyncio.run(parse_args(sys.argv[1:]))
print("SAID", '"' + found.server_args.disaggregation_transfer_backend + '"')
"""


def said(engine: str, program: str, *arguments: str, **environment: str) -> tuple[list[Any], str]:
    """What a program in an environment with Dynamo said, and everything that it printed."""
    done = subprocess.run(
        [os.environ[f"STATELINK_DYNAMO_{engine.upper()}"], "-W", "ignore", "-c", program, *arguments],
        env={**os.environ, **ENGINES[engine], "DYN_DISCOVERY_BACKEND": "mem", **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    lines = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("SAID ")]
    return [json.loads(line) for line in lines], done.stdout + done.stderr


def test_dynamos_table_has_the_connector_also_beside_another_one() -> None:
    found, log = said("vllm", TABLE)
    assert len(found) == 2, log
    for params in found:
        assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)


def test_dynamos_prefill_worker_replaces_what_an_answer_said() -> None:
    """So no state goes back to prefill, whatever a client passes on."""
    (found,), _ = said("vllm", ASKED)
    assert {name: value for name, value in found.items() if value} == {"do_remote_decode": True}


def test_vllms_list_of_plugins_can_leave_the_connector_out() -> None:
    found, log = said("vllm", TABLE, VLLM_PLUGINS="another")
    assert not found
    assert "Unsupported kv_connector='StatelinkConnector'" in log


@pytest.fixture(scope="module")
def options(llama: Path) -> list[str]:
    """Of a decode worker for SGLang."""
    return [
        *("--model-path", str(llama), "--device", "cpu", "--attention-backend", "torch_native"),
        *("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "statelink"),
        *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
    ]


def test_dynamo_takes_the_backend(options: list[str]) -> None:
    found, log = said("sglang", PARSED, *options)
    assert found == ["statelink"], log


def test_sglangs_list_of_plugins_can_leave_the_backend_out(options: list[str]) -> None:
    found, log = said("sglang", PARSED, *options, SGLANG_PLUGINS="another")
    assert not found
    assert "invalid choice: 'statelink'" in log


def test_an_sglang_that_differs_is_refused_with_what_differs(options: list[str]) -> None:
    differs = "from sglang.srt.disaggregation.base import conn\ndel conn.BaseKVSender.clear\n"
    found, log = said("sglang", differs + PARSED, *options)
    assert not found
    assert "BaseKVSender lacks the methods clear" in log
    assert "invalid choice: 'statelink'" in log
