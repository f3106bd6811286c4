"""How commands end: pipes that close, full disks, interrupts, plain terminals; and what their help says."""

from __future__ import annotations

import json
import os
import pty
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from statelink.cli import main
from statelink.errors import StatelinkError
from statelink.wire import Endpoint
from statelink_demo.cli import demo

PROGRAM = "import sys; sys.argv[0] = 'statelink'; from statelink.cli import main; main()"


def start(*arguments: str, code: str = PROGRAM, **options: object) -> subprocess.Popen[str]:
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], text=True, **given)  # type: ignore[call-overload,no-any-return]


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


SMALL = ["backends", "--no-probe"]
"""Its output waits in a buffer until the end."""
WITH_RICH = [*SMALL], [*SMALL, "--json"], ["--help"], ["explain", "--presets"]


@pytest.mark.parametrize("arguments", WITH_RICH, ids=" ".join)
def test_a_pipe_whose_reader_has_gone(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = start(*arguments, stdout=writer)
    os.close(writer)
    code, _, said = ended(process)
    assert (code, said) == (1, "")


@pytest.mark.parametrize("arguments", WITH_RICH, ids=" ".join)
def test_a_full_disk(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        code, _, said = ended(start(*arguments, stdout=full))
    assert (code, said) == (1, "Error: the output cannot be written: No space left on device\n")


def test_standard_error_cannot_be_written() -> None:
    with open("/dev/full", "w") as full:
        assert ended(start("doctor", "no-such", stderr=full))[0] == 1
        assert ended(start("teleport", stderr=full))[0] == 1


def test_lines_in_a_pipe_have_no_blanks_at_their_ends() -> None:
    code, out, _ = ended(start(*SMALL))
    assert code == 0
    assert out.startswith("name ")
    assert [line for line in out.splitlines() if line.endswith(" ")] == []
    filled = on_a_terminal(*SMALL).splitlines()
    assert any(line.endswith(" ") for line in filled), "the table has no such lines, and this test proves nothing"


PAIR = ["bench", "tcp", "--size", "4096", "--blocks", "1", "--seconds", "0.01"]
"""It starts processes, and reads what they answer."""


@pytest.mark.parametrize("arguments", [SMALL, PAIR], ids=" ".join)
@pytest.mark.parametrize("closed", [(1,), (0, 1), (0, 1, 2)])
def test_a_closed_standard_stream_is_no_error(arguments: list[str], closed: tuple[int, ...]) -> None:
    process = start(*arguments, stdout=None, preexec_fn=lambda: [*map(os.close, closed)])
    code, _, said = ended(process)
    assert (code, "Traceback" in said) == (0, False), said


def test_an_interrupt() -> None:
    code = PROGRAM.replace("main()", "main(['sleeps'])").replace(
        "from statelink.cli import main",
        "import click, time; from statelink.cli import main; "
        "main.command('sleeps')(lambda: (click.echo('here'), time.sleep(60)))",
    )
    process = start(code=code)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    assert ended(process) == (130, "", "\nInterrupted.\n")


def test_an_interrupt_of_conform_ends_its_processes(tmp_path: Path) -> None:
    process = start("conform", "tcp", "-k", "Dying or Moving", env={**os.environ, "TMPDIR": str(tmp_path)})
    assert process.stderr is not None
    assert "1 of" in process.stderr.readline()
    (kit,) = children(process.pid)
    process.send_signal(signal.SIGINT)
    code, _, said = ended(process)
    assert code == 130
    assert "Traceback" not in said
    assert not Path(f"/proc/{kit}").exists()
    assert [each for each in tmp_path.iterdir() if each.name.startswith("statelink-conform")] == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("command", ["bench", "doctor"])
def test_a_signal_ends_the_processes_of_a_command(
    tmp_path: Path, command: str, number: signal.Signals, status: int
) -> None:
    process = start(command, "tcp", env={**os.environ, "TMPDIR": str(tmp_path)})
    if command == "bench":  # by the first result, Python has told its processes what they run
        assert process.stderr is not None
        assert "1 of" in process.stderr.readline()
    while not (started := children(process.pid)):
        assert process.poll() is None, "it ended before it was told to"
        time.sleep(0.01)
    process.send_signal(number)
    code, _, said = ended(process)
    assert code == status
    assert "Traceback" not in said
    assert not any(Path(f"/proc/{each}").exists() for each in started)
    assert [each for each in tmp_path.iterdir() if each.name.startswith("statelink-")] == []


def test_an_interrupt_is_the_usual_end_of_watching(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    process = start("inspect", "--watch", "--json", "--every", "0.1", env=environment)
    assert process.stdout is not None
    for _ in range(2):
        json.loads(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    code, _, said = ended(process)
    assert (code, said) == (0, "")


def test_watching_on_a_terminal_leaves_the_last_look_there(tmp_path: Path) -> None:
    said = on_a_terminal("inspect", str(tmp_path / "no.sock"), "--watch", "--every", "0.1", "--count", "3")
    assert said.count("No such file") == 4, "three looks on the other screen, and the last one here"


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """What a command prints to a terminal."""
    ours, theirs = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    process = start(*arguments, stdout=theirs, stderr=theirs, env={**kept, "TERM": "xterm-256color", **environment})
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 1 << 16):
            said += part
    except OSError:  # the terminal's way to end
        pass
    finally:
        os.close(ours)
    process.wait(60)
    return said.decode()


DOCTOR = ["doctor", "tcp", "--no-loopback"]


def test_colour_is_for_terminals_that_have_it() -> None:
    assert "\x1b[32m" in on_a_terminal(*DOCTOR)
    assert "\x1b" not in on_a_terminal(*DOCTOR, TERM="dumb")
    assert "\x1b[32m" not in on_a_terminal(*DOCTOR, NO_COLOR="1")
    code, piped, _ = ended(start(*DOCTOR))
    assert (code, "\x1b" in piped) == (0, False)


def test_a_terminal_that_lacks_a_character(tmp_path: Path) -> None:
    side = tmp_path / "side.toml"
    side.write_text('preset = "llama-3-8b"\n')
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    code, said, _ = ended(start("explain", str(side), str(side), env=environment))
    assert code == 0
    assert "(blocks \\xd7 mean size" in said


def commands(group: click.Group = main, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")


COMMANDS = [pytest.param(path, command, id=path) for path, command in [*commands(), ("demo", demo)]]


@pytest.mark.parametrize(("path", "command"), COMMANDS)
def test_help_is_made_of_whole_sentences(path: str, command: click.Command) -> None:
    short = command.get_short_help_str(60)
    assert short.endswith("."), f"the list of commands cuts it: {short!r}"
    assert short[0].isupper()
    for each in command.params:
        if isinstance(each, click.Option):
            says = (each.help or "").partition("  [default")[0]
            assert says.endswith("."), f"{path} {each.name}: {says!r}"
            assert says[:1].isupper(), f"{path} {each.name}: {says!r}"


@pytest.mark.parametrize(("path", "command"), [*commands()])
def test_every_command_prints_json(path: str, command: click.Command) -> None:
    if not isinstance(command, click.Group):
        flags = {flag for each in command.params for flag in each.opts}
        assert "--json" in flags, path


def test_json_of_the_commands_that_make_something(tmp_path: Path) -> None:
    def run(*arguments: str) -> dict[str, object]:
        result = CliRunner().invoke(main, [*arguments, "--json"])
        assert result.exit_code == 0, result.output
        found: dict[str, object] = json.loads(result.stdout)
        return found

    made = run("keys", "new", str(tmp_path / "a"))
    assert made == {
        "secret_file": str(tmp_path / "a"),
        "public_file": str(tmp_path / "a.pub"),
        "public": (tmp_path / "a.pub").read_text().strip(),
    }
    assert run("keys", "show", str(tmp_path / "a")) == {"public": made["public"], "address": ""}
    address = "tcp://10.0.0.5:7400"
    keyed = str(Endpoint(address, str(made["public"])))
    assert run("keys", "show", str(tmp_path / "a"), "--address", address)["address"] == keyed
    package = run("new-backend", "mine", "-d", str(tmp_path / "mine"))
    assert package["package"] == "statelink-mine"
    assert Path(str(package["folder"]), "pyproject.toml").is_file()


def test_an_error_of_the_library_is_an_error_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "none").write_text("")
    (tmp_path / "none").chmod(0o600)
    result = CliRunner().invoke(main, ["keys", "show", str(tmp_path / "none")])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error [config.keys]: ")
    assert "does not hold one secret key" in result.stderr


def test_another_program_may_take_the_errors_itself() -> None:
    with pytest.raises((click.ClickException, StatelinkError)):
        main.main(["explain", "no-such", "no-such"], standalone_mode=False)


def no_files() -> None:
    """No file of this process may have a byte."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def test_doctor_where_no_temporary_file_can_be_written() -> None:
    code, said, _ = ended(start("doctor", "tcp", "--json", preexec_fn=no_files))
    (check,) = (each for each in json.loads(said)["checks"] if each["what"] == "loopback transfer")
    assert (code, check["verdict"], check["code"]) == (1, "problem", "command.folder")
    assert check["found"].startswith("no temporary file can be written: ")
    assert "set TMPDIR" in check["hint"]


def test_conform_where_no_temporary_file_can_be_written() -> None:
    code, said, error = ended(start("conform", "tcp", preexec_fn=no_files))
    assert (code, said) == (1, "")
    first, hint = error.splitlines()
    assert first.startswith("Error [command.folder]: no temporary file can be written: ")
    assert hint.startswith("hint: set TMPDIR to a directory that can be written")
