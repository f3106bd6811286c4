"""The table of the repository's parts counts what git tracks, and compares it with what was recorded."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from tools.sizes import sizes, table

if TYPE_CHECKING:
    from pathlib import Path


def test_it_counts_what_is_tracked(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    for name, text in (("core/a.py", "1\n2\n"), ("core/b.bin", "x\n"), ("README.md", "1\n"), ("core/untracked.py", "")):
        (tmp_path / name).write_text(text)
    for words in (["init", "-q"], ["add", "core/a.py", "core/b.bin", "README.md"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    assert sizes(tmp_path) == {"(top)": (1, 1), "core": (2, 1)}


def test_it_says_what_has_changed() -> None:
    first, second, total = table({"core": (10, 2)}, {"core": (12, 2), "tools": (3, 1)})
    assert first.split() == ["core", "10", "lines", "(-2)", "2", "files", "(+0)"]
    assert second.split() == ["tools", "0", "lines", "(-3)", "0", "files", "(-1)"]
    assert total.split() == ["all", "10", "lines", "(-5)", "2", "files", "(-1)"]
