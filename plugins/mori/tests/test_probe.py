"""The probe, on a machine that lacks everything, on one that lacks nothing, and the refusal."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

import statelink_mori
from statelink.backend import BackendContext, Batch, Blocks, Op
from statelink.errors import BackendUnavailableError, UnsupportedError
from statelink_mori import MoriBackend, Options, _machine

if TYPE_CHECKING:
    from pathlib import Path

ONLY = "statelink-mori 0.1 only probes; it does not move bytes"


def test_public_names() -> None:
    public = [name for name in vars(statelink_mori) if not name.startswith("_") and name != "annotations"]
    assert sorted(public) == statelink_mori.__all__


@pytest.mark.parametrize("probe", ["", "; statelink_mori.MoriBackend.probe(statelink_mori.Options())"])
def test_neither_import_nor_probe_imports_the_library(probe: str) -> None:
    code = f"import statelink_mori{probe}; print(sorted(sys.modules.keys() & {{'mori', 'mori.io', 'torch'}}))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_declaration() -> None:
    """It declares nothing, so nothing can be asked of it."""
    assert (MoriBackend.api_version, MoriBackend.name) == (1, "mori")
    assert (MoriBackend.capabilities.ops, MoriBackend.capabilities.memory_kinds) == (frozenset(), frozenset())
    assert list(MoriBackend.strategies) == ["*"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing, but for what a test puts there."""
    for name in ("KFD", "NODES", "INFINIBAND"):
        monkeypatch.setattr(_machine, name, tmp_path / name)
    monkeypatch.setattr(_machine, "_loads", lambda name: (tmp_path / name).exists())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: (tmp_path / name).exists() or None)
    return tmp_path


def put(machine: Path, name: str, text: str = "") -> None:
    (machine / name).parent.mkdir(parents=True, exist_ok=True)
    (machine / name).write_text(text)


@pytest.mark.parametrize("transport", ["rdma", "xgmi", "fabric"])
def test_machine_without_anything(machine: Path, transport: str) -> None:
    probe = MoriBackend.probe(msgspec.convert({"transport": transport}, Options))
    assert not probe.ok
    assert probe.reason.startswith(f"{ONLY}. This machine lacks what MoRI needs: the Python package mori is not")
    clauses = probe.reason.split("; ")[2:]
    assert clauses[:3] == [
        "the Python package torch is not installed, and mori imports it",
        "librocm_smi64.so cannot be loaded",
        "libamdhip64.so cannot be loaded",
    ]
    rdma = ["libibverbs.so.1 cannot be loaded"] if transport == "rdma" else []
    kfd = f"there is no {machine / 'KFD'}: no AMD GPU, or its driver is not loaded or not visible here"
    needs = {
        "rdma": "rdma needs 1 AMD GPU (for host memory, too), and the driver lists 0",
        "xgmi": "xgmi needs 2 AMD GPUs, and the driver lists 0",
        "fabric": "fabric needs 2 AMD GPUs, and the driver lists 0",
    }
    port = [f"no RDMA port in {machine / 'INFINIBAND'} is active"] if transport == "rdma" else []
    assert clauses[3:] == [*rdma, kfd, needs[transport], *port]
    assert probe.details == {"gpus": "none", "active RDMA ports": "none"}


def test_machine_with_everything(machine: Path) -> None:
    """The answer is still no, and does not blame the machine."""
    for name in ("mori", "torch", "librocm_smi64.so", "libamdhip64.so", "libibverbs.so.1", "KFD"):
        put(machine, name)
    for number, identity in enumerate(["0", "5056"]):
        put(machine, f"NODES/{number}/gpu_id", f"{identity}\n")
    put(machine, "INFINIBAND/mlx5_0/ports/1/state", "4: ACTIVE\n")
    put(machine, "INFINIBAND/mlx5_1/ports/1/state", "1: DOWN\n")
    probe = MoriBackend.probe(Options())
    assert (probe.ok, probe.reason) == (False, f"{ONLY}. MoRI's needs are met here")
    assert probe.details == {"gpus": "1", "active RDMA ports": "mlx5_0/1"}
    (machine / "INFINIBAND/mlx5_0/ports/1/state").write_text("2: INIT\n")
    probe = MoriBackend.probe(Options())
    assert probe.reason.endswith(f"lacks what MoRI needs: no RDMA port in {machine / 'INFINIBAND'} is active")


def test_libraries_are_really_looked_for() -> None:
    assert _machine._loads("libc.so.6")
    assert not _machine._loads("libno_such_thing.so")


def test_refused_options() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"transport": "tcp"}, Options)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"port": 1}, Options)


def test_every_method_refuses() -> None:
    with pytest.raises(BackendUnavailableError, match=ONLY):
        MoriBackend(BackendContext(options=Options(), link="x"))
    backend = MoriBackend.__new__(MoriBackend)
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

    monkeypatch.setattr("statelink_mori._backend.gpus", broken)
    probe = MoriBackend.probe(Options())
    assert (probe.ok, probe.reason) == (False, f"{ONLY}. Looking for what it needs failed: the disk is gone")
