"""The screens of the documentation: what commands show on a terminal of 80 columns while links are at work.

``python -m tools.screens [NAME...]`` runs `examples/one_minute.py` and, beside it, each command on a terminal of its
own. It writes what was seen to ``docs/screen-NAME.svg``. Numbers differ from run to run. So no test compares the files
with a later run, but `tests/docs/test_screens.py` compares the words that do not change.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import html
import io
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WIDTH, HEIGHT = 80, 40
PATIENCE = 120.0
STATELINK = (sys.executable, "-c", "from statelink.cli import main; main(prog_name='statelink')")

SCREENS = {
    "inspect": "statelink inspect {pid}",
    "top": "statelink top {pid} --every 1 --count 3",
    "bench": "statelink bench tcp --size 16k --size 1m --blocks 1 --blocks 64 --seconds 0.5",
}
"""Name of a screen to its command. ``pid`` is the process that has the links."""

FONT = re.compile(r"@font-face \{.*?\n\s*\}\n", re.DOTALL)
"""A rule that loads a font from elsewhere. Pictures of the documentation load nothing."""
LETTERS = re.compile(r'<text class="[^"]*" x="(?P<x>[\d.]+)" y="(?P<y>[\d.]+)"[^>]*clip-path[^>]*>(?P<text>.*?)</text>')
CURSOR = re.compile(r"\x1b\[\?\d+[hl]|\x1b\[[HJK]|\x1b\[\d*[JK]")
LETTER = 12.2
"""Width of a letter in such a picture."""
WHOLE_SCREEN_ENDS = "\x1b[?1049l"
"""What a program sends when it gives the terminal back that it had to itself."""


@contextlib.contextmanager
def program() -> Iterator[tuple[int, dict[str, str]]]:
    """Links at work. Yields their process id, and the environment in which commands find them."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    env = {name: value for name, value in os.environ.items() if not name.startswith(("STATELINK_", "NO_COLOR"))}
    # In a folder of its own, with a short path, since the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory() as folder:
        env |= {"XDG_RUNTIME_DIR": folder, "TERM": "xterm-256color", "COLUMNS": str(WIDTH), "LINES": str(HEIGHT)}
        command = [sys.executable, str(ROOT / "examples" / "one_minute.py"), "600", port]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                if not process.stdout.readline().startswith("process "):
                    sys.exit("the program with the links has ended")
                yield process.pid, env
            finally:
                process.kill()


def typed(command: str, env: Mapping[str, str]) -> str:
    """What a command leaves on a terminal, with its colours as escape sequences."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    arguments = [*STATELINK, *command.split()[1:]]
    process = subprocess.Popen(arguments, env=env, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    parts = []
    with open(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # EIO: nobody writes to it any more
        while part := terminal.read(1 << 16):
            parts.append(part)
    if process.wait(PATIENCE):
        sys.exit(f"{command} ended with {process.returncode}")
    shown = b"".join(parts).decode().replace("\r\n", "\n").rpartition(WHOLE_SCREEN_ENDS)[2]
    return CURSOR.sub("", shown).rstrip()


def drawn(command: str, shown: str) -> str:
    """A picture of a terminal, which begins with the command."""
    console = Console(file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(shown), soft_wrap=True)
    name = command.split()[1]
    picture = FONT.sub("", console.export_svg(title="", unique_id=f"screen-{name}"))
    title = f'role="img">\n<title>What {html.escape(command)} shows</title>'
    return "\n".join(line.rstrip() for line in picture.replace(">", f" {title}", 1).splitlines()) + "\n"


def lines_of(picture: str) -> list[str]:
    """The lines of a picture that `drawn` has made. The first one has the command. Empty ones are left out."""
    rows: dict[float, str] = defaultdict(str)
    for match in LETTERS.finditer(picture):
        y, column = float(match["y"]), round(float(match["x"]) / LETTER)
        rows[y] = rows[y].ljust(column) + html.unescape(match["text"]).replace("\xa0", " ")
    return [row.rstrip() for _, row in sorted(rows.items())]


def record(name: str, pid: int, env: Mapping[str, str]) -> str:
    """Run the command of a screen, and draw what it shows."""
    command = SCREENS[name].format(pid=pid)
    return drawn(command, typed(command, env))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(SCREENS)}; all of them by default")
    names = parser.parse_args().names or list(SCREENS)
    if unknown := set(names) - set(SCREENS):
        parser.error(f"no such screen: {', '.join(sorted(unknown))}")
    with program() as (pid, env):
        for name in names:
            path = DOCS / f"screen-{name}.svg"
            path.write_text(record(name, pid, env))
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
