"""Run every test, in processes of pytest side by side, each with its share of the folders.

``python -m tools.side_by_side FOLDER``: what a share found of the conformance kit is then in FOLDER, as JSON. What
a share prints is shown whole when it has ended, so that no two are mixed; until then, it is in a file in FOLDER, too.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHARES = {
    "links": ("tests/link", "tests/load", "tests/topology"),
    "processes": (
        "examples/demo/tests",
        "plugins/mooncake/tests",
        "plugins/mori/tests",
        "plugins/nixl/tests",
        "tests/deaths",
        "tests/kit",
        "tests/quiescence",
    ),
}
"""Folders of the shares. One more has every other folder: none is forgotten. More of them would be done sooner, and
keep those tests waiting for too long in which a side stops, or is silent for a while."""
EVERY = 60.0
"""Seconds between two lines that say how far all are."""


class Share:
    """One process of pytest.

    Args:
        name: Of the share.
        folder: Where its output and its report go.
        arguments: What it runs.
    """

    def __init__(self, name: str, folder: Path, arguments: Sequence[str]) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-m", "pytest", f"--statelink-report={folder / name}.json", *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    @property
    def progress(self) -> str:
        """How far it is, in pytest's words."""
        said: list[str] = re.findall(r"\[ *(\d+%)\]$", self.log.read_text(errors="replace"), re.MULTILINE)
        return f"{self.name} {said[-1] if said else '0%'}"

    def end(self) -> None:
        """Wait until it has ended, and print everything that it said."""
        self.process.wait()
        print(f"== tests: {self.name}", flush=True)
        sys.stdout.buffer.write(self.log.read_bytes())
        sys.stdout.buffer.flush()


def main(folder: Path) -> int:
    """Run all shares: 0, or the exit status of one that failed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shares = [Share(name, folder, within) for name, within in SHARES.items()]
    shares.append(Share("others", folder, [f"--ignore-glob={each}/*" for within in SHARES.values() for each in within]))

    def stop(*_: object) -> None:
        for share in shares:
            share.process.terminate()

    signal.signal(signal.SIGTERM, stop)
    running, said = list(shares), time.monotonic()
    try:
        while running:
            for share in [each for each in running if each.process.poll() is not None]:
                running.remove(share)
                share.end()
            if running and time.monotonic() - said > EVERY:
                said = time.monotonic()
                print("== tests:", ", ".join(each.progress for each in running), flush=True)
            time.sleep(0.2)
    except KeyboardInterrupt:  # it has reached all of them: they say what it interrupted
        for share in running:
            share.end()
    return next((share.process.returncode for share in shares if share.process.returncode), 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
