"""Prints how large each part of the repository is, beside how large it was at the last release.

    python -m tools.sizes [--record]

Lines and files that git tracks, of Python, Markdown, C, shell and TOML. ``--record`` writes them to ``sizes.json``,
once a release.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import Counter
from pathlib import Path

KINDS = {".py", ".md", ".c", ".h", ".sh", ".toml"}
RECORDED = Path(__file__).with_name("sizes.json")
ALONE = "(top)"
"""The part that the files at the top are."""


def sizes(root: Path) -> dict[str, tuple[int, int]]:
    """Lines and files of each folder at the top of a repository."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name in filter(None, names.split("\0")):
        path = Path(name)
        if path.suffix in KINDS and (root / path).is_file():
            part = path.parts[0] if len(path.parts) > 1 else ALONE
            lines[part] += len((root / path).read_bytes().splitlines())
            files[part] += 1
    return {part: (lines[part], files[part]) for part in sorted(files)}


def table(now: dict[str, tuple[int, int]], before: dict[str, tuple[int, int]]) -> list[str]:
    """A line for each part, and one for all."""
    both = {name: (now.get(name, (0, 0)), before.get(name, (0, 0))) for name in sorted(now.keys() | before.keys())}
    total = [tuple(map(sum, zip(*side, strict=True))) for side in zip(*both.values(), strict=True)]
    rows = [*both.items(), ("all", (total[0], total[1]))]
    return [
        f"{name:12} {here[0]:8,} lines ({here[0] - there[0]:+,}) {here[1]:6,} files ({here[1] - there[1]:+,})"
        for name, (here, there) in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="note them as those of the release")
    given = parser.parse_args()
    now = sizes(RECORDED.parents[1])
    if given.record:
        RECORDED.write_text(json.dumps(now, indent=1) + "\n")
    before = {name: (lines, files) for name, (lines, files) in json.loads(RECORDED.read_text()).items()}
    print("\n".join(["since the last release:", *table(now, before)]))


if __name__ == "__main__":
    main()
