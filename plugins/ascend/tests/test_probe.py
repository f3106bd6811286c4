"""The probe, on a machine that lacks everything, on one that lacks nothing, and the refusal."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

import statelink_ascend
from statelink.backend import BackendContext, Batch, Blocks, Op
from statelink.errors import BackendUnavailableError, UnsupportedError
from statelink_ascend import AscendBackend, Options, _machine

if TYPE_CHECKING:
    from pathlib import Path

ONLY = "statelink-ascend 0.1 only probes; it does not move bytes"


def test_public_names() -> None:
    public = [name for name in vars(statelink_ascend) if not name.startswith("_") and name != "annotations"]
    assert sorted(public) == statelink_ascend.__all__


@pytest.mark.parametrize("probe", ["", "; statelink_ascend.AscendBackend.probe(statelink_ascend.Options())"])
def test_neither_import_nor_probe_imports_the_library(probe: str) -> None:
    code = f"import statelink_ascend{probe}; print(sorted(sys.modules.keys() & {{'memfabric_hybrid', 'torch'}}))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_declaration() -> None:
    """It declares nothing, so nothing can be asked of it."""
    assert (AscendBackend.api_version, AscendBackend.name) == (1, "ascend")
    assert (AscendBackend.capabilities.ops, AscendBackend.capabilities.memory_kinds) == (frozenset(), frozenset())
    assert list(AscendBackend.strategies) == ["*"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing, but for what a test puts there."""
    monkeypatch.setattr(_machine, "DEV", tmp_path / "dev")
    monkeypatch.setattr(_machine, "INSTALLED", tmp_path / "install.info")
    monkeypatch.setattr(_machine, "library", lambda: "1.3.0" if (tmp_path / "memfabric").exists() else None)
    monkeypatch.setattr("statelink_ascend._backend.library", lambda: _machine.library())
    monkeypatch.setattr(_machine, "_loads", lambda name: (tmp_path / name).exists())
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    put(tmp_path, "install.info", f"Driver_Install_Path_Param={tmp_path / 'ascend'}\n")
    return tmp_path


def put(machine: Path, name: str, text: str = "") -> None:
    (machine / name).parent.mkdir(parents=True, exist_ok=True)
    (machine / name).write_text(text)


def test_machine_without_anything(machine: Path) -> None:
    put(machine, "dev/davinci_manager")
    probe = AscendBackend.probe(Options())
    assert not probe.ok
    assert probe.reason.startswith(f"{ONLY}. This machine lacks what it needs: the Python package memfabric_hybrid")
    assert probe.reason.split("; ")[2:] == [
        f"there is no NPU: no {machine / 'dev'}/davinci0, nor any other number",
        f"there is no NPU driver: {machine / 'ascend/driver/version.info'} is absent or names no version",
        "CANN is not set up: ASCEND_HOME_PATH is not set (source its set_env.sh)",
        "libascend_hal.so cannot be loaded: the driver's libraries are not on the loader's path",
    ]
    assert probe.details == {"memfabric": "none", "devices": "none", "driver": "none"}


def test_machine_with_everything(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is still no, and does not blame the machine."""
    for name in ("memfabric", "dev/davinci0", "dev/davinci12", "libascend_hal.so"):
        put(machine, name)
    put(machine, "ascend/driver/version.info", "Version=25.2.0\nInnerversion=V100R001C22\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(machine / "cann"))
    probe = AscendBackend.probe(Options())
    assert probe.reason.endswith(
        f"lacks what it needs: CANN is incomplete: {machine / 'cann'}/lib64/libascendcl.so is absent"
    )
    put(machine, "cann/lib64/libascendcl.so")
    probe = AscendBackend.probe(Options())
    assert (probe.ok, probe.reason) == (False, f"{ONLY}. MemFabric's needs are met here")
    assert probe.details == {"memfabric": "1.3.0", "devices": "davinci0, davinci12", "driver": "V100R001C22"}


def test_driver_without_an_install_file(machine: Path) -> None:
    (machine / "install.info").unlink()
    assert str(_machine.driver()[1]) == "/usr/local/Ascend/driver/version.info"


def test_libraries_are_really_looked_for() -> None:
    assert _machine._loads("libc.so.6")
    assert not _machine._loads("libno_such_thing.so")


def test_refused_options() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"port": 1}, Options)


def test_every_method_refuses() -> None:
    with pytest.raises(BackendUnavailableError, match=ONLY):
        AscendBackend(BackendContext(options=Options(), link="x"))
    backend = AscendBackend.__new__(AscendBackend)
    one, zero = np.ones(1, np.uint64), np.zeros(1, np.uint32)
    for call in (
        lambda: backend.register(()),
        backend.descriptor,
        lambda: backend.connect("x", b"", ()),
        lambda: backend.submit("x", Batch(Op.WRITE, Blocks(one, one, one, zero, zero), 1, 1)),
        lambda: backend.poll(()),
        lambda: backend.disconnect("x"),
        backend.close,
    ):
        with pytest.raises(UnsupportedError, match=ONLY):
            call()


def test_probe_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[str]:
        raise OSError("the disk is gone")

    monkeypatch.setattr("statelink_ascend._backend.devices", broken)
    probe = AscendBackend.probe(Options())
    assert (probe.ok, probe.reason) == (False, f"{ONLY}. Looking for what it needs failed: the disk is gone")
