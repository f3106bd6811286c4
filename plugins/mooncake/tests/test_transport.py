"""Which transport an engine uses, and what is said of a machine that lacks something."""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from plugins.mooncake.tests.test_package import needs_mooncake
from tests.helpers.backend_peer import make

from statelink.backend import Verdict
from statelink.testing import bare_machine
from statelink_mooncake import MooncakeBackend, Options

if TYPE_CHECKING:
    from pathlib import Path

INFINIBAND = "sys/class/infiniband"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    """A machine with nothing, but for what a test puts there."""
    with bare_machine(tmp_path):
        yield tmp_path


@pytest.mark.parametrize(
    ("protocol", "devices", "may"),
    [
        ("auto", [], {"tcp"}),
        ("auto", ["mlx5_0"], {"rdma", "tcp"}),
        ("rdma", [], {"tcp"}),  # what a regular build makes of it
        ("tcp", ["mlx5_0"], {"tcp"}),
        ("efa", ["mlx5_0"], set()),
    ],
)
def test_what_an_engine_may_use(
    machine: Path, monkeypatch: pytest.MonkeyPatch, protocol: str, devices: list[str], may: set[str]
) -> None:
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    for device in devices:
        (machine / INFINIBAND / device).mkdir(parents=True)
    assert MooncakeBackend.transports(Options(protocol=protocol)) == may
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    assert MooncakeBackend.transports(Options(protocol=protocol)) == may - {"rdma"}


@needs_mooncake
@pytest.mark.parametrize(("topology", "word"), [("[[], []]", "tcp"), ('[["mlx5_0"], []]', "rdma")])
def test_the_librarys_own_topology_decides_where_it_may_be_either(
    machine: Path, monkeypatch: pytest.MonkeyPatch, topology: str, word: str
) -> None:
    library: Any = importlib.import_module("mooncake.engine")
    engine = type(
        "Engine", (library.TransferEngine,), {"get_local_topology": lambda self, devices: f'{{"cpu:0": {topology}}}'}
    )
    monkeypatch.setattr(library, "TransferEngine", engine)
    (machine / INFINIBAND / "mlx5_0").mkdir(parents=True)
    near, far = make(MooncakeBackend, "near"), make(MooncakeBackend, "far")
    try:
        assert isinstance(near, MooncakeBackend)
        near.connect("far", far.descriptor(), ())
        assert near.transport("far") == word
        assert near.transport("nobody") == "unknown"
    finally:
        near.close()
        far.close()


def without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the loader load everything but one library."""

    def load(library: str) -> None:
        if library == name:
            raise OSError(library)

    monkeypatch.setattr(ctypes, "CDLL", load)


def say(options: Options | None = None) -> dict[str, tuple[Verdict, str]]:
    checks = MooncakeBackend.diagnose(options or Options())
    return {check.what: (check.verdict, check.hint) for check in checks}


def test_a_missing_library_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    without("libibverbs.so.1", monkeypatch)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    said = say()
    assert said["libibverbs.so.1"] == (Verdict.PROBLEM, "sudo apt-get install -y libibverbs1")
    assert said["libnuma.so.1"][0] is Verdict.OK


@needs_mooncake
def test_a_library_that_this_build_does_without_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    without("libibverbs.so.1", monkeypatch)
    assert say()["libibverbs.so.1"][0] is Verdict.NOT_APPLICABLE


def test_builds_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ["mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"]
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"mooncake": both})
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.3")
    verdict, hint = say()["package"]
    assert verdict is Verdict.PROBLEM
    assert f"pip uninstall -y {' '.join(both)}" in hint
    monkeypatch.setattr(importlib.metadata, "packages_distributions", dict)
    assert say()["package"][0] is Verdict.PROBLEM


@pytest.mark.usefixtures("machine")
def test_settings_that_do_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert say(Options(protocol="rdma"))["protocol rdma"][0] is Verdict.PROBLEM
    assert say(Options(devices="mlx5_9"))["devices"][0] is Verdict.PROBLEM
    monkeypatch.delenv("MC_TCP_PROTO", raising=False)
    assert say()["environment"][0] is Verdict.OK
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    assert say()["environment"] == (Verdict.PROBLEM, "unset MC_TCP_PROTO")
