"""The documents say what is: their code runs, and what they list is complete."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tools import pictures

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "statelink"


def fenced(text: str, marker: str) -> str:
    """The code block that follows an HTML comment."""
    match = re.search(rf"<!-- {re.escape(marker)} -->\n```python\n(.*?)```", text, re.DOTALL)
    assert match, marker
    return match.group(1)


def occurs(code: str, text: str) -> bool:
    """Whether lines follow each other in a text, at whatever depth."""
    wanted, lines = textwrap.dedent(code).splitlines(), text.splitlines()
    windows = ("\n".join(lines[at : at + len(wanted)]) for at in range(len(lines) - len(wanted) + 1))
    return any(textwrap.dedent(window).splitlines() == wanted for window in windows)


PROGRAMS = [("engine.md", "two_processes.py"), ("engine.md", "both_ways.py"), ("positions.md", "layers.py")]


@pytest.mark.parametrize(("page", "program"), PROGRAMS)
def test_an_example_of_the_guide_is_the_program_and_moves_the_bytes(page: str, program: str) -> None:
    example = ROOT / "examples" / program
    assert occurs(fenced((ROOT / "docs" / page).read_text(), f"extract: examples/{program}"), example.read_text())
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("the bytes are equal\n")


def test_every_error_code_in_the_source_is_documented_and_no_other() -> None:
    found: set[str] = set()
    patterns = (
        r'code(?::\s*str)?\s*=\s*"([a-z_.]+)"',
        r'_code\s*=\s*"([a-z_.]+)"',
        r'_code: ClassVar\[str\] = "([a-z_.]+)"',
        r'(?:reason_for|fail_late)\(\s*"([a-z_.]+)"',
        r'room_reason\([^"]*"([a-z_.]+)"',
        r'self\._reason\(\s*"([a-z_.]+)"',
        r'\bReason\(\s*"([a-z_.]+)"',
        r'else "((?:backend|room|peer)\.[a-z_]+)"',
    )
    for path in [*CORE.rglob("*.py"), *ROOT.glob("adapters/*/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]:
        text = path.read_text()
        for pattern in patterns:
            found.update(re.findall(pattern, text))
    found.discard("unknown")  # of vLLM's statistics, for a room without a reason
    documented = set(re.findall(r'<a id="([a-z_.]+)">', (ROOT / "docs" / "errors.md").read_text()))
    assert found - documented == set()
    assert documented - found == set()


def test_the_pictures_and_the_table_of_layers_match_the_import_rules() -> None:
    assert list(pictures.defects()) == []


def test_the_reading_path_names_files_that_exist() -> None:
    path = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where to start reading")[2].partition("\n## ")[0]
    named = [each for each in re.findall(r"`([\w/-]+(?:\.py|/))`", path) if "/" in each]
    assert len(named) > 20
    assert [each for each in named if not (CORE / each).exists() and not (ROOT / each).exists()] == []


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]
LINK = re.compile(r"\]\((?P<target>[^)#:]*)(?:#(?P<anchor>[^)]*))?\)")


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as viewers of Markdown make them, and the ones that it sets itself."""
    text = page.read_text()
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(page: Path) -> None:
    for match in LINK.finditer(page.read_text()):
        target = (page.parent / match["target"]) if match["target"] else page
        assert target.exists(), match["target"]
        if match["anchor"]:
            assert match["anchor"] in anchors(target), match[0]


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    listed = {(index.parent / match["target"]).resolve() for match in LINK.finditer(index.read_text())}
    assert {page for page in PAGES if index.parent in page.parents} - listed == {index}
