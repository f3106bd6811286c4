"""Every block of code in the documentation is tested, is taken from a file that is, or says why it does not run."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from statelink.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^>]*?) -->\n)?^```(?P<language>\S*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
SITE = ("{toctree}", "{eval-rst}")


class Block(NamedTuple):
    """A block of code, and what its page says of it."""

    page: Path
    mark: str
    code: str


def blocks() -> list[Block]:
    return [
        Block(page, match["mark"] or "", match["code"])
        for page in PAGES
        for match in BLOCK.finditer(page.read_text())
        if match["language"] not in SITE
    ]


BLOCKS = [pytest.param(each, id=f"{each.page.stem}-{number}") for number, each in enumerate(blocks())]


def test_there_are_blocks() -> None:
    assert len(BLOCKS) > 40


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_is_tested_or_says_why_not(block: Block) -> None:
    kind, _, rest = block.mark.partition(": ")
    if kind == "extract":
        code = textwrap.dedent(block.code)
        found = [textwrap.dedent(part) for part in windows((ROOT / rest).read_text(), code.count("\n"))]
        assert code in found, f"this is not in {rest}"
    elif kind == "whole":
        assert block.code == (ROOT / rest).read_text(), f"this is not {rest}"
    elif kind.startswith("tested by "):
        test = ROOT / kind.removeprefix("tested by ")
        assert block.page.name in test.read_text(), f"{test.name} does not read {block.page.name}"
        assert not rest or rest in test.read_text()
    else:
        assert kind == "not run", "put a comment above it: extract, whole, tested by, or not run, with the reason"
        assert len(rest.split()) > 4, "say why it does not run"


def windows(text: str, height: int) -> list[str]:
    lines = text.splitlines(keepends=True)
    return ["".join(lines[at : at + height]) for at in range(len(lines) - height + 1)]


def test_the_tutorials_show_code_of_every_part() -> None:
    shown = {block.mark.rpartition("/")[2] for block in blocks() if block.mark.startswith(("extract: ", "whole: "))}
    modules = {path.name for path in (ROOT / "examples" / "backend-shm" / "src" / "statelink_shm").glob("_*.py")}
    assert shown >= modules - {"__init__.py", "_grants.py", "_segment.py"} | {"acme_pieces.py", "acme_state.py"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_block_is_only_indented(page: Path) -> None:
    """Such a block could not have a comment."""
    fenced = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
    assert not re.search(r"\n\n {4}", fenced.sub("", page.read_text()))


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("sglang.md", "sglang"),
        ("vllm.md", "vllm"),
        *((page, engine) for page in ("adapters.md", "two-engines.md", "dynamo.md") for engine in ("sglang", "vllm")),
    ],
)
def test_servers_on_gpus_take_the_configurations(name: str, engine: str) -> None:
    code = "\n".join(block.code for block in blocks() if block.page.name == name)
    begin = {"sglang": "_CONFIG='", "vllm": '"kv_connector_extra_config": '}[engine]
    given = [json.JSONDecoder().raw_decode(code, place.end())[0] for place in re.finditer(re.escape(begin), code)]
    found = [each for each in given if engine in each]  # the others are of other connectors
    assert found
    assert all(set(each[engine]["allow"]) == {"cuda"} for each in found)
    for option in re.findall("--kv-transfer-config '(.*?)'", code, re.DOTALL):
        json.loads(option)


def test_a_session_prints_what_the_page_says() -> None:
    """The examples print it; their own tests run them."""
    (session,) = (block for block in blocks() if block.mark == "tested by tests/docs/test_blocks.py: session")
    assert session.page.name == "try-it.md"
    steps = re.findall(r"\$ python (\S+)\n(.*)\n", session.code)
    assert len(steps) == 2
    for program, printed in steps:
        assert f'"{printed}"' in (ROOT / program).read_text()


def test_a_synopsis_has_commands_and_options_that_exist() -> None:
    lines = [
        line
        for block in blocks()
        if block.page.name == "operate.md" and block.mark.endswith(": synopsis")
        for line in block.code.splitlines()
    ]
    assert len(lines) >= 8
    for line in lines:
        name = line.split()[1]
        said = CliRunner().invoke(main, [name, "--help"])
        assert said.exit_code == 0, line
        for option in re.findall(r"(?<= )--?[a-z-]+", line):
            assert option in said.output, line
