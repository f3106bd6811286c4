"""Every built-in state type over every backend, and the README's table of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from statelink import state

ROOT = Path(__file__).parents[2]
SIDE = [sys.executable, "-m", "tests.matrix.side"]


def moved(backend: str) -> dict[str, str]:
    """What a decode process found in its pools."""
    prefill = subprocess.Popen(
        [*SIDE, "prefill", backend], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert prefill.stdout is not None
        address = prefill.stdout.readline().strip()
        assert address, prefill.communicate()[1]
        decode = subprocess.run(
            [*SIDE, "decode", backend, address], cwd=ROOT, capture_output=True, text=True, timeout=90, check=False
        )
        assert decode.returncode == 0, decode.stderr
        _, errors = prefill.communicate(timeout=60)
        assert prefill.returncode == 0, errors
    finally:
        prefill.kill()
        prefill.wait()
    verdicts: dict[str, str] = json.loads(decode.stdout.splitlines()[-1])
    return verdicts


def table() -> dict[str, dict[str, str]]:
    """The README's table: state type to backend to cell."""
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\|(.+)\|$", text[text.index("| state type |") :].split("\n\n")[0], re.MULTILINE)
    head, _, *body = [[cell.strip() for cell in row.split("|")] for row in rows]
    return {row[0].replace("`", ""): dict(zip(head[1:], row[1:], strict=True)) for row in body}


def test_every_state_type_moves_and_the_readme_says_so(backend: str) -> None:
    verdicts = moved(backend)
    assert set(verdicts.values()) == {"yes"}, verdicts
    written = {label: row[backend] for label, row in table().items()}
    assert written == verdicts


def test_no_built_in_type_is_left_out() -> None:
    from tests.matrix.side import components

    covered = {build()[0].component.kind.name for build in components(16).values()}
    assert covered == {kind.name for kind in state.state_types() if "." not in kind.name}


def test_the_readme_claims_nothing_for_backends_that_only_probe() -> None:
    for label, row in table().items():
        assert {row["mori"], row["ascend"]} == {"no"}, label
