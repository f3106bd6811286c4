"""The README says what other pages and programs say, and its commands are commands."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import textwrap
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from tools.matrix import backends

from statelink import LinkConfig
from statelink.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMPARISON = (ROOT / "docs" / "comparison.md").read_text()
WITH_SGLANG = "".join((ROOT / "docs" / page).read_text() for page in ("sglang.md", "adapters.md"))


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_the_figures_are_lines_of_the_page_about_performance() -> None:
    figures = rows(README.partition("<!-- figures: sglang-short -->")[2].partition("<!-- figures: end -->")[0])
    assert len(figures) == 8
    measured = set(rows((ROOT / "docs" / "performance.md").read_text()))
    assert [line for line in figures if line not in measured] == []


def test_the_figures_name_commands_that_are_there() -> None:
    section = README.partition("## What it costs")[2].partition("\n## ")[0]
    targets, modules = re.findall(r"`make ([\w-]+)`", section), re.findall(r"`python -m ([\w.]+)`", section)
    assert targets
    assert modules
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in targets if f"\n{name}:" not in makefile] == []
    assert [name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").exists()] == []


def test_the_comparison_names_the_releases_of_its_page() -> None:
    assert dict(re.findall(r"\b(SGLang|vLLM|LMCache|Dynamo) (\d+\.\d+\.\d+)", README)) == dict(
        re.findall(r"^\| (SGLang|vLLM|LMCache|Dynamo) \| (\d+\.\d+\.\d+) \|", COMPARISON, re.MULTILINE)
    )


def test_every_fact_of_the_comparison_has_a_source() -> None:
    facts = [line for line in rows(COMPARISON) if re.match(r"\| (SGLang|vLLM|LMCache|Dynamo|Statelink) \|", line)]
    assert len(facts) > 25
    assert [line for line in facts if len(line.split(" | ")) < 3 or not line.split(" | ")[-1].strip(" |")] == []


def block(name: str) -> str:
    """The shell code below a comment of that name."""
    match = re.search(rf"<!-- tested by tests/docs/test_readme.py: {name} -->\n```sh\n(.*?)```", README, re.DOTALL)
    assert match
    return match[1]


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_an_engine_needs_few_lines_and_packages_of_this_checkout(name: str) -> None:
    lines = block(name).splitlines()
    assert len(lines) <= 4
    command, *packages = shlex.split(lines[0])[1:]
    assert command == "install"
    assert [each for each in packages if not (ROOT / each / "pyproject.toml").exists()] == []


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_the_adapter_has_the_same_lines(name: str) -> None:
    adapter = (ROOT / "adapters" / name / "README.md").read_text()
    assert textwrap.indent(block(name), "    ") in adapter


def test_the_line_for_sglang_is_a_configuration() -> None:
    given = json.loads(shlex.split(block("sglang").splitlines()[1])[1].partition("=")[2])
    assert given.pop("sglang") == {"allow": ["cuda"]}
    assert given.pop("backend") in backends()
    assert given == {}


def test_the_configurations_of_the_pages_for_sglang_are_valid() -> None:
    texts = re.findall(r"^export STATELINK_SGLANG_CONFIG='([^']*)'", WITH_SGLANG, re.MULTILINE)
    assert len(texts) >= 2
    for text in texts:
        given = json.loads(text)
        assert given.pop("sglang", {}).keys() <= {"allow", "model", "rows"}
        given.pop("keys", {})  # files that are not on this machine
        msgspec.convert({"role": "prefill", **given}, type=LinkConfig)
        assert given["backend"] in backends()


def test_the_lines_for_vllm_are_configurations() -> None:
    _, *servers = block("vllm").splitlines()
    assert len(servers) == 2
    for line in servers:
        script = f"printf %s {line.partition('--kv-transfer-config ')[2]}"
        said = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, timeout=20, check=True, cwd=ROOT
        ).stdout
        given = json.loads(said)
        assert given["kv_role"] == "kv_both"
        extra = given["kv_connector_extra_config"]
        assert extra.pop("vllm") == {"allow": ["cuda"]}
        msgspec.convert({"role": "both", **extra}, type=LinkConfig)


def test_the_lines_for_a_backend_are_commands() -> None:
    made, _, conform = (shlex.split(line, comments=True) for line in block("backend").splitlines())
    for command in (made, conform):
        shown = CliRunner().invoke(main, [command[1], "--help"])
        assert shown.exit_code == 0
        assert "NAME" in shown.output
