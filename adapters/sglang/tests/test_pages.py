"""SGLang's own parser takes the command lines of the pages, and the adapter the configurations. Starts no server."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

import pytest
from pages import commands, objects, with_keys
from sglang.srt.server_args import ServerArgs

from statelink_sglang.backend import VARIABLE, read_options

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(("page", "modes"), [("sglang.md", ["prefill", "decode"]), ("two-engines.md", ["prefill"])])
def test_sglang_takes_the_command_lines(page: str, modes: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    found = [parser.parse_args(words) for words in commands(page, "python -m sglang.launch_server")]
    assert [each.disaggregation_mode for each in found] == modes
    assert {each.disaggregation_transfer_backend for each in found} == {"statelink"}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("page", ["sglang.md", "adapters.md", "two-engines.md", "llm-d.md", "dynamo.md"])
def test_the_adapter_takes_the_configurations(tmp_path: Path, page: str, role: str) -> None:
    (given,) = objects(page, f"{VARIABLE}='?(?={{)")
    options = read_options(role, {VARIABLE: json.dumps(with_keys(given, tmp_path))})
    assert (options.link.backend, options.allow) == ("nixl", frozenset({"cuda"}))
