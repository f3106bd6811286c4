"""Which transport an engine uses, and what is said of a machine that lacks something."""

from __future__ import annotations

import importlib.metadata
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from plugins.mooncake.tests.peer import make
from plugins.mooncake.tests.test_package import needs_mooncake

from statelink.backend import Verdict
from statelink_mooncake import MooncakeBackend, Options, _backend, _diagnosis
from statelink_mooncake._library import Library


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
    monkeypatch: pytest.MonkeyPatch, protocol: str, devices: list[str], may: set[str]
) -> None:
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    monkeypatch.setattr(_backend, "rdma_devices", lambda: devices)
    assert MooncakeBackend.transports(Options(protocol=protocol)) == may
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    assert MooncakeBackend.transports(Options(protocol=protocol)) == may - {"rdma"}


@needs_mooncake
def test_the_librarys_own_topology_decides_where_it_may_be_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backend, "rdma_devices", lambda: ["mlx5_0"])
    backend: Any = make("near")
    try:
        assert backend._transport == "tcp"  # the library finds no such device here
        assert backend.transport("nobody") == "unknown"
    finally:
        backend.close()
    found = SimpleNamespace(get_local_topology=lambda devices: '{"cpu:0": [["mlx5_0"], []]}')
    assert Library(Options()).finds_devices(found, Options())


def say(options: Options | None = None) -> dict[str, tuple[Verdict, str]]:
    checks = MooncakeBackend.diagnose(options or Options())
    return {check.what: (check.verdict, check.hint) for check in checks}


def test_a_missing_library_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_diagnosis, "loads", lambda name: name != "libibverbs.so.1")
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    said = say()
    assert said["libibverbs.so.1"] == (Verdict.PROBLEM, "sudo apt-get install -y libibverbs1")
    assert said["libnuma.so.1"][0] is Verdict.OK


@needs_mooncake
def test_a_library_that_this_build_does_without_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_diagnosis, "loads", lambda name: name != "libibverbs.so.1")
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


def test_settings_that_do_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_diagnosis, "rdma_devices", list)
    assert say(Options(protocol="rdma"))["protocol rdma"][0] is Verdict.PROBLEM
    assert say(Options(devices="mlx5_9"))["devices"][0] is Verdict.PROBLEM
    monkeypatch.delenv("MC_TCP_PROTO", raising=False)
    assert say()["environment"][0] is Verdict.OK
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    assert say()["environment"] == (Verdict.PROBLEM, "unset MC_TCP_PROTO")
