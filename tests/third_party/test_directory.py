"""A directory of somebody else's package is found by the scheme of its address, and introduces links to each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.third_party.parties import PACKAGES, parties

from statelink.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def listed(address: str) -> list[tuple[str, bool]]:
    """Instances, and whether they are complete, as an operator's command sees them."""
    code = "from statelink.cli import main; main()"
    command = [sys.executable, "-c", code, "rendezvous", "--list", address, "--json"]
    done = subprocess.run(command, env={**os.environ, **PACKAGES}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["instances"]
    return [(each["instance"], each["complete"]) for each in found]


def test_links_find_each_other_through_it(tmp_path: Path) -> None:
    (shared := tmp_path / "shared").mkdir()
    address = f"folder://{shared}"
    with parties(tmp_path, "tcp", "kv", rendezvous=address, rendezvous_options={"lifetime": 60.0}) as pair:
        case = pair.case(40)
        receiving = pair.decode.receive(case.room, "prefill", case.tokens, case.target, prefix=case.prefix)
        sending = pair.send(case)
        pair.push(sending, case)
        pair.ended(case, receiving, sending)
        assert listed(address) == [("decode", True), ("prefill", True)]
        pair.prefill.close()
        assert listed(address) == [("decode", True)]
        case = pair.case(40)
        text = pair.decode.receive(case.room, "absent", case.tokens, case.target, deadline=1.0).failed(20)
        assert f"not every rank has a file in {address}" in text


@pytest.mark.parametrize(
    ("allowed", "options", "said"),
    [
        ("", {}, "unknown directory 'folder': known: tcp"),
        ("acme-folder", {"lifetme": 1.0}, "unknown key 'lifetme' in the options of the directory 'folder'"),
        ("acme-folder", {}, "is no folder"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    tmp_path: Path, allowed: str, options: dict[str, float], said: str
) -> None:
    plugins = {"STATELINK_PLUGINS": allowed}
    config = {"rendezvous": f"folder://{tmp_path}/absent", "rendezvous_options": options}
    with pytest.raises(ConfigError) as refused, parties(tmp_path, "tcp", "kv", plugins, plugins, **config):
        pass
    assert said in str(refused.value)
