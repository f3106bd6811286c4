"""The pages for operators and routers name what is there: error codes, settings with their defaults, snapshots."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from tools import configuration

from statelink import LinkConfig
from statelink.cli import main
from statelink.config import read_config
from statelink.registry import load_backend
from statelink.wire import PROTOCOL

DOCS = Path(__file__).parents[2] / "docs"
CODES = set(re.findall(r'<a id="([a-z_.]+)">', (DOCS / "errors.md").read_text()))
FAMILIES = {code.partition(".")[0] for code in CODES} - {"statelink"}
PAGES = ("production.md", "router.md", "compatibility.md", "scope.md")


def words(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_.]+)`", text))


def section(page: str, title: str) -> str:
    text = (DOCS / page).read_text()
    assert f"\n## {title}\n" in text
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("page", PAGES)
def test_codes_of_errors_are_documented_ones(page: str) -> None:
    named = {word for word in words((DOCS / page).read_text()) if re.match(r"[a-z]+\.[a-z_]+$", word)}
    assert {word for word in named if word.partition(".")[0] in FAMILIES} <= CODES


@pytest.mark.parametrize(
    ("page", "title"), [("production.md", "When something fails"), ("router.md", "When a request fails")]
)
def test_the_tables_of_failures_have_only_codes_in_their_first_column(page: str, title: str) -> None:
    rows = [line for line in section(page, title).splitlines() if line.startswith("| `")]
    assert len(rows) > 8
    for row in rows:
        assert words(row.split("|")[1]) <= CODES, row


def test_settings_have_the_defaults_that_the_page_says() -> None:
    defaults = {field.encode_name: field.default for field in msgspec.structs.fields(LinkConfig)}
    said = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section("production.md", "Settings that matter"), re.MULTILINE)
    assert len(said) >= 8
    for name, text in said:
        default = defaults[name]
        number = re.match(r"[\d,]+", text)
        if number:
            assert float(number[0].replace(",", "")) == default, name
        elif text.startswith("`"):
            assert text.strip("`") == default, name
        else:
            assert not default, name


def test_what_to_watch_is_in_a_snapshot() -> None:
    keys = words(section("operate.md", "What is it doing: `statelink inspect`"))
    watched = section("production.md", "What to watch")
    named = {word for row in watched.splitlines() if row.startswith("| `") for word in words(row.split("|")[1])}
    assert len(named) > 8
    assert named <= keys


def test_the_configurations_for_a_long_line_are_read(tmp_path: Path) -> None:
    page = (DOCS / "between-datacenters.md").read_text()
    ((name, toml),) = re.findall(r"test_operators\.py: (line) -->\n```toml\n(.*?)```", page, re.DOTALL)
    CliRunner().invoke(main, ["keys", "new", str(tmp_path / "key")])
    (tmp_path / "key.pub").rename(tmp_path / "allowed")
    file = tmp_path / f"{name}.toml"
    file.write_text(toml.replace("/etc/statelink", str(tmp_path)))
    read = read_config(file, {}).config
    given = {"tcp": [read.options]}
    for backend, options in re.findall(r"^\| `(\w+)` \| `(\{.*?\})` \|(?:.*?)$", page, re.MULTILINE):
        given.setdefault(backend, []).append(json.loads(options))
    assert set(given) == {"tcp", "nixl", "mooncake"}
    for backend, each in given.items():
        for options in each:
            msgspec.convert(options, load_backend(backend).Options)


def test_the_page_of_the_configuration_is_up_to_date() -> None:
    assert (DOCS / "configuration.md").read_text() == configuration.render(), "run 'python -m tools.configuration'"


def test_every_key_of_the_configuration_and_its_variable_are_on_the_page() -> None:
    """Each variable of the page, with the default that the page says, makes the default configuration."""
    rows = {
        cells[0].strip("`"): cells
        for line in (DOCS / "configuration.md").read_text().partition("\n## ")[0].splitlines()
        if line.startswith("| `") and (cells := re.split(r" \| ", line.strip("| ")))
    }
    assert set(rows) == set(LinkConfig.__struct_fields__)
    assert all(len(cells) == 5 and cells[4] for cells in rows.values())
    variables = {cells[3].strip("`"): cells[2].split("`")[1] for cells in rows.values() if cells[2].startswith("`")}
    assert len(variables) > 11
    read = read_config(None, {"STATELINK_ROLE": "decode", "STATELINK_BACKEND": "auto", **variables})
    assert read.config == LinkConfig(role="decode", backend="auto")
    assert set(read.origins) == {name.removeprefix("STATELINK_").lower() for name in variables} | {"role", "backend"}


def test_the_steps_for_memory_in_quarantine_name_what_is_there() -> None:
    keys = words(section("operate.md", "What is it doing: `statelink inspect`")) | set(LinkConfig.__struct_fields__)
    metrics = words((DOCS / "metrics.md").read_text())
    named = words(section("production.md", "Memory in quarantine"))
    assert {"quarantined", "quarantined_bytes", "oldest", "holds", "heard", "take_back_after"} <= named
    assert {word.rpartition(".")[2] for word in named} - keys - metrics == set()


def test_the_change_log_has_the_protocol_of_what_is_not_released() -> None:
    """The page about compatibility sends those who upgrade a fleet there."""
    assert '"Protocol"' in (DOCS / "compatibility.md").read_text()
    unreleased = (DOCS.parent / "CHANGELOG.md").read_text().partition("\n## Unreleased\n")[2].partition("\n## ")[0]
    low, high = PROTOCOL
    assert f"\nProtocol: {low if low == high else f'{low} to {high}'}.\n" in unreleased
