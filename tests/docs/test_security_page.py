"""The steps of docs/security.md, run as a reader would."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from statelink import state

if TYPE_CHECKING:
    import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()


def test_the_steps_that_set_up_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, serve = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    code = re.findall(
        r"<!-- tested by tests/docs/test_security_page.py: keys -->\n```python\n(.*?)```", PAGE, re.DOTALL
    )
    program = f'{shlex.quote(sys.executable)} -c "from statelink.cli import main; main()"'
    monkeypatch.chdir(tmp_path)
    env = {name: value for name, value in os.environ.items() if not name.startswith("STATELINK_")}
    subprocess.run(
        f'statelink() {{ {program} "$@"; }}\n{make}', shell=True, executable="/bin/bash", env=env, check=True
    )
    assert len(list((tmp_path / "keys" / "allowed").iterdir())) == 3
    started = f"exec {serve.replace('7400', '0').replace('statelink', program, 1)}"
    server = subprocess.Popen(started, shell=True, executable="/bin/bash", env=env, stdout=subprocess.PIPE, text=True)
    names: dict[str, Any] = {}
    exec(compile(code[0], "security.md", "exec"), names)
    pages = np.random.default_rng(0).integers(0, 255, (4, 8, 16, 2, 8), dtype=np.uint8)

    def inventory(instance: str, first: int) -> state.Inventory:
        return state.describe(instance, [state.kv_pages({0: (pages[first], pages[first + 1])}, heads=2)])

    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        with (
            names["open_link"]("prefill", inventory("prefill-0", 0), address) as prefill,
            names["open_link"]("decode", inventory("decode-0", 2), address) as decode,
        ):
            receiving = decode.receive(1, "prefill-0", 32, {"kv": [3, 4]})
            sending = prefill.send(1, 32)
            sending.push({"kv": [1, 2]})
            assert receiving.wait(20)
            assert receiving.reason is None
            np.testing.assert_array_equal(pages[2:, 3:5], pages[:2, 1:3])
    finally:
        server.terminate()
        assert server.wait(20) == 0
        assert server.stdout is not None
        server.stdout.close()
