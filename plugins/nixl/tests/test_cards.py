"""A host with a graphics card of NVIDIA: NIXL finds it on the PCI bus, and then wants transports for CUDA."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from plugins.nixl.tests import stub
from plugins.nixl.tests.test_package import needs_nixl
from tests.helpers.backend_peer import make

from statelink.backend import Verdict
from statelink.testing import bare_machine
from statelink_nixl import NixlBackend, Options

if TYPE_CHECKING:
    from pathlib import Path

CARD = {"vendor": "0x10de", "class": "0x030200", "device": "0x2330", "numa_node": "0"}
TRY = """
import json, os, sys
from tests.helpers.backend_peer import make
from statelink_nixl import NixlBackend
from statelink.errors import BackendUnavailableError
found = {}
for tls in ("tcp", "^cuda"):
    try:
        make(NixlBackend, "here", {"ucx": {"TLS": tls}}).close()
        found[tls] = "opened"
    except BackendUnavailableError as error:
        found[tls] = error.hint
print(json.dumps(found), flush=True)
os._exit(0)
"""


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def put_device(bus: Path, **values: str) -> None:
    folder = bus / "0000:10:00.0"
    folder.mkdir(parents=True)
    for name, value in {**CARD, **values}.items():
        (folder / name).write_text(f"{value}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    with bare_machine(tmp_path):
        yield tmp_path


@needs_nixl
@pytest.mark.parametrize(
    ("device", "given", "used"),
    [
        ({}, "tcp", "tcp,cuda_copy"),
        ({}, "rc,cuda", "rc,cuda"),
        ({}, "^cuda", "^cuda"),  # the user says what is not wanted
        ({}, "all", "all"),
        ({"class": "0x020000"}, "tcp", "tcp"),  # a network card of NVIDIA
        ({"vendor": "0x1002"}, "tcp", "tcp"),
        (None, "tcp", "tcp"),
    ],
)
@pytest.mark.parametrize("where", ["options", "environment"])
def test_a_list_of_transports_gets_one_for_cuda(
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: dict[str, str] | None,
    given: str,
    used: str,
    where: str,
) -> None:
    if device is not None:
        put_device(machine / "sys/bus/pci/devices", **device)
    seen: list[str | None] = []
    agent = stub.installed(monkeypatch)
    monkeypatch.setattr(agent, "create_backend", lambda *_: seen.append(os.environ.get("UCX_TLS")))
    options = {"ucx": {"TLS": given}} if where == "options" else {}
    monkeypatch.delenv("UCX_TLS", raising=False)
    if where == "environment":
        monkeypatch.setenv("UCX_TLS", given)
    with caplog.at_level(logging.INFO, "statelink"):
        make(NixlBackend, "here", options).close()
    assert seen == [used]
    assert (f"UCX_TLS={used}" in caplog.text) is (used != given)
    assert os.environ.get("UCX_TLS") == (given if where == "environment" else None)


@needs_nixl
@pytest.mark.parametrize("card", [False, True])
def test_doctor_loads_the_modules_for_cuda(machine: Path, card: bool) -> None:
    """They need NVIDIA's libraries, and doctor names those that are not there."""
    if card:
        put_device(machine / "sys/bus/pci/devices")
    found = {check.what: check for check in NixlBackend.diagnose(Options())}["UCX's modules for CUDA"]
    lacks = [name for name in ("libcuda.so.1", "libnvidia-ml.so.1") if not loads(name)]
    if not card:
        assert found.verdict is Verdict.NOT_APPLICABLE
    elif not lacks:
        assert found.verdict is Verdict.OK
    else:
        assert found.verdict is Verdict.PROBLEM
        assert any(name in found.found for name in lacks)
        assert found.hint


@needs_nixl
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs a mount namespace of its own")
def test_the_real_library_starts_there(tmp_path: Path) -> None:
    put_device(tmp_path / "pci")
    mount = f"mount --bind {tmp_path / 'pci'} /sys/bus/pci/devices"
    command = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$0" "$@"', sys.executable, "-c", TRY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tcp"] == "opened"
    assert "NIXL refuses TLS=^cuda: add cuda_copy" in found["^cuda"]  # so NIXL did see the card
