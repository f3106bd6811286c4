"""A number that an option does not take is refused as such, before a command does anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from statelink.cli import main

WRONG = ("nan", "inf", "1e300", "-1", "", "x", "9" * 5000)
BEFORE = {"bench": ("tcp",), "conform": ("tcp",), "explain": ("side.toml", "side.toml")}
"""What a command needs beside the option."""


def numbers() -> Iterator[tuple[str, str]]:
    """Each command, and each of its options that has a fraction or is a number of bytes."""
    for name in (*BEFORE, "inspect", "top"):
        command = main.get_command(click.Context(main), name)
        assert command is not None
        for option in command.params:
            if isinstance(option.type, click.FloatRange) or option.metavar == "BYTES":
                yield name, option.opts[0]


@pytest.mark.parametrize(("command", "option"), list(numbers()))
def test_it_is_a_usage_error(command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("side.toml").write_text('preset = "bamba-9b"')
    for value in WRONG:
        result = CliRunner().invoke(main, [command, *BEFORE.get(command, ()), option, value])
        assert result.exit_code == 2, result.output
        assert f"Invalid value for '{option}'" in result.output


def test_a_block_that_no_server_takes_is_refused() -> None:
    result = CliRunner().invoke(main, ["bench", "tcp", "--size", "1025g"])
    assert result.exit_code == 2
    assert "'1025g' is more than 1024g" in result.output
