"""Run every test, in processes of pytest side by side, each with its share of the folders.

``python -m tools.side_by_side FOLDER``: what a share found of the conformance kit is then in FOLDER, as JSON. What
a share prints is shown whole when it has ended, so that no two are mixed; until then, it is in a file in FOLDER, too.

Tests of processes that stop, are silent or die wait for a time, and the other shares may keep the processor from them
for longer. So where few failed, they are run once more when nothing else runs, and named at the end: what fails then
has failed.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

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
FEW = 3
"""Tests of a share that may have failed for want of time; more of them have failed for a reason."""
EVERY = 60.0
"""Seconds between two lines that say how far all are."""


class Share:
    """One process of pytest.

    Args:
        name: Of the share.
        folder: Where its output and its report go.
        arguments: What it runs.
        cache: Where pytest keeps what failed.
    """

    def __init__(self, name: str, folder: Path, arguments: Sequence[str], cache: Path | None = None) -> None:
        self.name = name
        self.folder = folder
        self.arguments = arguments
        self.cache = cache or folder / f"{name}.cache"
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-m", "pytest", f"--statelink-report={folder / name}.json", *arguments]
        command += ["-o", f"cache_dir={self.cache}"]
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

    @property
    def failed(self) -> list[str]:
        """The tests that failed, if that is all that went wrong."""
        if self.process.returncode != pytest.ExitCode.TESTS_FAILED:
            return []
        return list(json.loads((self.cache / "v/cache/lastfailed").read_text()))

    def again(self) -> Share:
        """A run of what failed alone, which has begun."""
        return Share(f"{self.name}-again", self.folder, [*self.arguments, "--last-failed"], self.cache)


def settle(shares: list[Share]) -> int:
    """Run again what failed, where it is little: 0, or the exit status of one that failed."""
    status, named = 0, []
    for share in list(shares):
        found = share.process.returncode
        failed = share.failed
        if 0 < len(failed) <= FEW:
            again = share.again()
            shares.append(again)
            again.end()
            found = again.process.returncode
            if found in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                named += [each for each in failed if each not in again.failed]
        status = status or found
    for each in named:
        print("== tests: failed beside the others, passed by itself:", each, flush=True)
    return status


def main(folder: Path) -> int:
    """Run all shares: 0, or the exit status of one that failed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shares = [Share(name, folder, within) for name, within in SHARES.items()]
    shares.append(Share("others", folder, [f"--ignore-glob={each}/*" for within in SHARES.values() for each in within]))

    def stop(*_: object) -> None:
        for share in shares:
            share.process.terminate()

    usual = signal.signal(signal.SIGTERM, stop)
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
        return settle(shares)
    except KeyboardInterrupt:  # it has reached all of them: they say what it interrupted
        for share in running:
            share.end()
        return signal.SIGINT + 128
    finally:
        signal.signal(signal.SIGTERM, usual)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
