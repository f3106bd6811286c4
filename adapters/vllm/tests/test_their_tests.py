"""vLLM's own unit tests of its scheduler with a connector, which is Statelink's.

See `support/their_defaults.py` for what of them is replaced. They cover the lives of requests that are prefilled or
decoded elsewhere, failures to load, invalid blocks, and the output of several workers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_environments import VLLM
from engine_processes import OwnProcess

from statelink_vllm.connector import SEAM

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(600)]

TESTS = Path(__file__).parent
FILES = (
    "test_remote_prefill_lifecycle",
    "test_remote_decode_lifecycle",
    "test_kv_load_failure_recovery",
    "test_invalid_blocks_correctness",
    "test_error_propagation",
    "test_cache_pollution_prevention",
    "test_output_aggregator",
)
OF_NIXL = (
    "test_remote_decode_lifecycle.py::test_short_prompt_lifecycle",
    "test_remote_decode_lifecycle.py::test_prefix_cache_lifecycle",
)
"""They look for what NIXL's connector answers to a router."""
CAPPED = "test_remote_prefill_lifecycle.py", "test_p_side_chunked_prefill_mamba"
"""Its prefill is asked for 128 tokens, and answers one, of a prompt that was cut. Statelink answers all of them, right
ones, and says that it sends nothing: see "The last token" of docs/vllm.md. It is not in every release."""
COUNTS = {"0.33": 46, "0.32": 40, "0.31": 35}
"""How many of them pass, by release, with `CAPPED`."""


@pytest.fixture(scope="module")
def theirs() -> Path:
    """The folder of vLLM's tests."""
    fetched = subprocess.run(
        [str(TESTS.parents[2] / "tools" / "vllm-tests.sh"), sys.executable], capture_output=True, text=True, check=False
    )
    if fetched.returncode:
        assert os.environ.get("CI") != "true", fetched.stderr
        pytest.skip(f"vLLM's tests could not be fetched: {fetched.stderr[-300:]}")
    return Path(fetched.stdout.strip()) / "tests" / "v1" / "kv_connector" / "unit"


@pytest.mark.shows("vLLM's own tests of its scheduler with a connector")
def test_vllms_own_tests_pass(theirs: Path, llama: Path, tmp_path: Path) -> None:
    package = tmp_path / "tests" / "v1" / "kv_connector" / "unit"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:3]):
        (folder / "__init__.py").touch()
    for name in ("conftest", "utils", *FILES):
        shutil.copy(theirs / f"{name}.py", package)
    unit = package.relative_to(tmp_path)
    capped = f"def {CAPPED[1]}(" in (package / CAPPED[0]).read_text()
    left_out = (*OF_NIXL, *(["::".join(CAPPED)] if capped else []))
    command = [
        *(
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "support.their_defaults",
        ),
        *(f"--rootdir={tmp_path}", *(f"--deselect={unit / each}" for each in left_out)),
        *(str(tmp_path / unit / f"{name}.py") for name in FILES),
    ]
    path = os.pathsep.join([str(tmp_path), str(TESTS)])
    environment = {**VLLM, "PYTHONPATH": path, "STATELINK_TINY_MODEL": str(with_words(llama, tmp_path / "model"))}
    process = OwnProcess("their tests", tmp_path, command, environment)
    try:
        code = process.wait_end(300.0)
    finally:
        process.kill()
    text = process.logged()
    assert code == 0, text[-8000:]
    assert f"{COUNTS[SEAM.release()] - capped} passed, {len(left_out)} deselected" in text, text[-2000:]


def with_words(model: Path, folder: Path) -> Path:
    """A copy of a model that has a tokenizer, which some of the tests make and do not use."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(model, folder)
    words = Tokenizer(models.WordLevel({str(number): number for number in range(8)}, unk_token="0"))
    fast: Any = PreTrainedTokenizerFast  # it has no types
    fast(tokenizer_object=words, unk_token="0", eos_token="1").save_pretrained(folder)
    return folder
