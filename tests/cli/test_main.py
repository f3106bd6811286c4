"""The command group: help, version, and commands that other packages bring or do not."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

import statelink
from statelink.cli import main

if TYPE_CHECKING:
    from tests.registry.sites import Site


def run(*arguments: str, expect: int = 0) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == expect, result.output
    return result.output


COMMAND = """
import click

@click.command()
@click.option("--name", default="you")
def hello(name):
    '''Say hello to somebody.'''
    click.echo(f"hello {name}")
"""


def command(site: Site, name: str, source: str, value: str = "") -> None:
    site.package(f"vendor-{name}", statelink_commands={name: value or f"vendor_{name}:hello"})
    site.module(f"vendor_{name}", source)


def test_help_and_version() -> None:
    for flag in ("--help", "-h"):
        printed = run(flag)
        assert printed.startswith("Usage: ")
        assert re.search(r"backends +List the installed backends", printed)
        assert "  demo " in printed
    assert run("--version") == f"statelink, version {statelink.__version__}\n"
    assert "--json" in run("backends", "--help")


def test_a_command_that_does_not_exist_is_a_usage_error() -> None:
    assert "No such command 'teleport'" in run("teleport", expect=2)


def test_other_packages_bring_commands(site: Site) -> None:
    command(site, "greet", COMMAND)
    assert re.search(r"greet +Say hello to somebody\.", run("--help"))
    assert run("greet", "--name", "decode") == "hello decode\n"


@pytest.mark.parametrize(
    ("source", "value", "text"),
    [
        (
            "import does_not_exist",
            "",
            "command 'greet' (vendor-greet 0.1) failed to load: ModuleNotFoundError: No module named 'does_not_exist'",
        ),
        ("import sys; sys.exit(5)", "", "command 'greet' (vendor-greet 0.1) failed to load: SystemExit: 5"),
        ("hello = 5", "", "command 'greet' is 5, not a click command"),
        ("", "no module!", "command 'greet' (vendor-greet 0.1) failed to load: "),
    ],
)
def test_a_broken_command_breaks_no_other(site: Site, source: str, value: str, text: str) -> None:
    command(site, "greet", source, value)
    command(site, "wave", COMMAND)
    printed = run("--help")
    assert "wave " in printed
    assert "greet " in printed
    assert run("wave") == "hello you\n"
    assert "tcp" in run("backends", "--no-probe")
    assert f"Error: {text}" in run("greet", expect=1)
    assert f"Error: {text}" in run("greet", "--name", "x", expect=1)


@pytest.mark.parametrize("arguments", [("--help",), ("backends", "--no-probe"), ("--version",)])
def test_a_package_whose_metadata_cannot_be_read_breaks_nothing(site: Site, arguments: tuple[str, ...]) -> None:
    command(site, "wave", COMMAND)
    site.package("vendor-bad")
    (site.folder / "vendor_bad-0.1.dist-info" / "entry_points.txt").write_text("[statelink.commands]\nfoo\n")
    run(*arguments)
    assert "wave " in run("--help")


def test_help_imports_no_library_of_any_backend(site: Site) -> None:
    site.backend("good", source="raise AssertionError('a backend was imported')")
    code = """
    import sys
    from click.testing import CliRunner
    from statelink.cli import main
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0, result.output
    print(sorted(set(sys.modules) & {"torch", "transformers", "nixl", "mooncake", "mori", "pytest", "statelink_good"}))
    """
    assert site.python(code) == "[]\n"


@pytest.mark.parametrize(
    ("name", "options", "folder", "does"),
    [
        ("bench", ["tcp"], "plugins/bench", "Measure backends between two processes"),
        ("demo", ["--backend", "tcp"], "examples/demo", "Hand over requests of a small model"),
        ("explain", ["a", "b", "--json"], "plugins/explain", "Plan a request between two fleets"),
    ],
)
def test_a_command_that_is_not_installed_says_what_to_install(
    site: Site, bare_path: str, name: str, options: list[str], folder: str, does: str
) -> None:
    for arguments, code in ((["--help"], 0), ([name], 2), ([name, *options], 2)):
        program = f"import sys; sys.argv = ['statelink', *{arguments}]; from statelink.cli import main; main()"
        printed = site.run([sys.executable, "-S", "-c", program], path=bare_path, expect=code)
        if code:
            said, hint = printed.splitlines()
            assert said == f"Error: '{name}' is brought by a package of its own"
            assert re.fullmatch(rf"hint: pip install (statelink-{name}|-e \S+/{folder})", hint)
        else:
            assert re.search(rf"{name} +{does}\. Needs statelink-{name}\.", printed)


def test_a_command_that_the_environment_leaves_out_says_what_to_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATELINK_PLUGINS", "statelink-nixl")
    said = run("explain", "a", "b", expect=2)
    assert said.endswith("hint: add statelink-explain to the environment variable STATELINK_PLUGINS\n")


def test_a_demo_that_is_installed_is_the_packages_own(site: Site) -> None:
    site.package("vendor-demo", statelink_commands={"demo": "vendor_demo:hello"})
    site.module("vendor_demo", COMMAND)
    assert run("demo", "--name", "x") == "hello x\n"


def test_the_installed_command_is_this_one() -> None:
    assert (Path(sys.executable).parent / "statelink").exists()


def test_a_server_that_would_be_open_to_all_names_the_options_of_its_command() -> None:
    said = " ".join(run("rendezvous", "--listen", "tcp://0.0.0.0:0", expect=1).split())
    assert said.startswith("Error [config.insecure]: this server would listen on tcp://0.0.0.0:0 without keys")
    assert "--insecure on a network" in said
    assert "insecure = true" not in said
    said = run("rendezvous", "--listen", "tcp://0.0.0.0:0", "--insecure", expect=1)
    assert said.startswith("Error [config.advertise]: ")
    assert "set --advertise to the host" in said


def test_a_server_that_allows_nobody_is_refused(tmp_path: Path) -> None:
    run("keys", "new", str(tmp_path / "key"))
    said = run("rendezvous", "--listen", "tcp://127.0.0.1:0", "--secret-file", str(tmp_path / "key"), expect=1)
    assert said.startswith("Error [config.keys]: this server has keys and allows nobody")
    assert "with --allow-file" in said
