"""The recorded screens show what the commands show today, and the pages that show them say what is seen."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools import screens

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {"inspect": "operate.md", "top": "operate.md", "bench": "performance.md"}
HEADS = {
    "inspect": ("prefill rank 0 of", "decode rank 0 of", "link ", "address ", "rooms ", "held ", "queues ", "peer "),
    "top": ("2 links", "pid "),
    "bench": ("backend ", "between ", "alone, "),
}
"""How lines begin that each run shows."""
UNIT = re.compile(r"([KMG]i)?B(/s)?,?")


@pytest.fixture(scope="module")
def at_work() -> Iterator[tuple[int, dict[str, str]]]:
    with screens.program() as program:
        yield program


def words(line: str) -> list[str]:
    """The words of a line that are the same in each run: no numbers, no units, and no plurals, which follow numbers."""
    kept = [word for word in line.split() if not re.search(r"\d", word) and not UNIT.fullmatch(word)]
    return [re.sub(r"s(,?)$", r"\1", word) for word in kept]


def line_of(lines: list[str], head: str) -> str:
    found = [line for line in lines if line.strip().startswith(head)]
    assert found, (head, lines)
    return found[0]


def test_each_screen_has_a_page() -> None:
    assert set(PAGES) == set(HEADS) == set(screens.SCREENS)
    assert {path.name for path in DOCS.glob("screen-*.svg")} == {f"screen-{name}.svg" for name in screens.SCREENS}


@pytest.mark.parametrize("name", screens.SCREENS)
def test_a_page_shows_it_with_words_for_those_who_do_not_see_it(name: str) -> None:
    (found,) = re.findall(rf"!\[([^]]+)\]\(screen-{name}\.svg\)", (DOCS / PAGES[name]).read_text())
    assert f"`statelink {name}`" in found or f"statelink {name}" in found
    assert len(found.split()) > 6


@pytest.mark.parametrize("name", screens.SCREENS)
def test_a_screen_is_a_picture_that_loads_nothing(name: str) -> None:
    picture = (DOCS / f"screen-{name}.svg").read_text()
    root = ET.fromstring(picture)
    assert root.get("role") == "img"
    assert root[0].tag.endswith("title")
    assert "url(http" not in picture
    assert "@import" not in picture
    assert "href" not in picture


@pytest.mark.parametrize("name", screens.SCREENS)
def test_a_screen_shows_what_the_command_shows_today(name: str, at_work: tuple[int, dict[str, str]]) -> None:
    """Apart from the numbers: the same lines, with the same columns."""
    recorded = screens.lines_of((DOCS / f"screen-{name}.svg").read_text())
    shown = screens.lines_of(screens.record(name, *at_work))
    again = f"run 'python -m tools.screens {name}'"
    assert words(recorded[0]) == words(shown[0]), again
    assert max(map(len, recorded[1:])) <= screens.WIDTH
    for head in HEADS[name]:
        columns = line_of(recorded, head), line_of(shown, head)
        if head in ("rooms ", "held ", "queues "):
            continue  # what a room is doing at that moment
        assert words(columns[0]) == words(columns[1]), again
