"""What the two engines' adapters describe of the same models, and what differs: nothing, or a list by name."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest
from support.servers import SGLANG, VLLM

from statelink import plan
from statelink.state import Inventory

pytestmark = pytest.mark.smoke

HERE = Path(__file__).parent
KINDS = {"mha": "mha", "swa": "swa", "chunked": "swa", "hybrid": "hybrid", "mla": "mla"}
"""Kinds of models, as vLLM has them, and what SGLang keeps of them. It takes an attention chunk for a window."""


def said(engine: str, environment: dict[str, str], *arguments: str) -> dict[str, Inventory]:
    """What an engine's adapter describes, by kind of model."""
    tests = HERE.parents[1] / engine / "tests"
    path = os.pathsep.join([str(tests), str(HERE.parents[1] / "testing")])
    script = str(HERE / "support" / f"say_{engine}.py")
    kinds = KINDS if engine == "vllm" else KINDS.values()
    done = subprocess.run(
        [os.environ[f"STATELINK_{engine.upper()}_PYTHON"], "-W", "ignore", script, *arguments, *kinds],
        env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    lines = [line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith("state: ")]
    found = (msgspec.msgpack.decode(bytes.fromhex(line), type=Inventory) for line in lines)
    return dict(zip(KINDS, found, strict=True))


@pytest.fixture(scope="module")
def engines(llama: Path) -> tuple[dict[str, Inventory], dict[str, Inventory]]:
    return said("sglang", SGLANG, str(llama)), said("vllm", VLLM)


def test_full_attention_is_described_alike(engines: tuple[dict[str, Inventory], dict[str, Inventory]]) -> None:
    sglang, vllm = (each["mha"] for each in engines)
    plan.match([sglang], [vllm])
    plan.match([vllm], [sglang])


DIFFERENCES: dict[str, list[str]] = {
    "swa": [
        "component swa (type swa): absent here, present there",
        *(f"component swa.{n} (type swa): present here, absent there" for n in range(3)),
    ],
    "chunked": [
        *(f"component chunked_local.{n} (type chunked_local): present here, absent there" for n in range(3)),
        "component swa (type swa): absent here, present there",
    ],
    "hybrid": [
        "component mamba (type mamba): absent here, present there",
        *(f"component mamba.{n} (type mamba): present here, absent there" for n in range(3)),
    ],
    "mla": [
        "kv: format: 'latent' here, '' there",
        *(
            f"kv/layers.{layer}.{part}: {said}"
            for layer in (0, 1)
            for part, said in (("kv", "present here, absent there"), ("latent", "absent here, present there"))
        ),
    ],
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_what_differs_is_named(engines: tuple[dict[str, Inventory], dict[str, Inventory]], kind: str) -> None:
    sglang, vllm = (each[kind] for each in engines)
    assert [str(each) for each in plan.differences([sglang], [vllm])] == DIFFERENCES[kind]
    swapped = plan.differences([vllm], [sglang])
    assert {each.path for each in swapped} == {each.path for each in plan.differences([sglang], [vllm])}
