"""The page about a backend in ten minutes has all of it, and its steps lead to what `make third-party` tests."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from statelink.cli import main

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "backend-procmem"
PAGE = (ROOT / "docs" / "ten-minutes.md").read_text()


def test_the_page_counts_its_lines() -> None:
    lines = (EXAMPLE / "src" / "statelink_procmem" / "_backend.py").read_text().splitlines()
    assert f"has\n{len(lines)} lines" in PAGE
    assert len(lines) <= 125


def test_the_steps_of_the_page_lead_to_the_example(tmp_path: Path) -> None:
    made = tmp_path / "statelink-procmem"
    command = re.search(r"```sh\nstatelink (.*)\n", PAGE)
    assert command
    result = CliRunner().invoke(main, [*command[1].split(), "--directory", str(made)])
    assert result.exit_code == 0, result.output
    code = re.search(r"```python\n(\"\"\"The backend: .*?)```", PAGE, re.DOTALL)
    assert code
    (made / "src" / "statelink_procmem" / "_backend.py").write_text(code[1])
    tests = made / "tests" / "test_conformance.py"
    kept = [line for line in tests.read_text().splitlines(keepends=True) if "processes = 1" not in line]
    assert len(kept) == len(tests.read_text().splitlines()) - 1
    tests.write_text("".join(kept))
    files = {path.relative_to(made) for path in made.rglob("*") if path.is_file()}
    assert {path for path in files if (made / path).read_text() != (EXAMPLE / path).read_text()} == {Path("README.md")}
