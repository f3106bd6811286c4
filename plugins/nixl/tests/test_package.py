"""What can be told of the backend without a peer."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plugins.nixl.tests import stub
from tests.helpers.backend_peer import make

import statelink
from statelink import state
from statelink.backend import Batch, Blocks, Region
from statelink.errors import BackendUnavailableError, TransferError
from statelink_conformance import PackageTests
from statelink_nixl import NixlBackend, Options

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="NIXL is not installed: pip install nixl"
)


class TestPackage(PackageTests):
    backend = "nixl"
    library = ("nixl", "nixl_cu12", "nixl_cu13")
    refused_options = [
        {"tls": "tcp"},
        {"backends": {}},
        {"connect_timeout": -1},
        {"ucx": {"TLS": 1}},
        {"sync_mode": "none"},
        {"num_threads": -1},
        {"devices": ["a,b"]},
        {"devices": ["lo"], "backends": {"LIBFABRIC": {}}},
        {"devices": ["lo"], "ucx": {"NET_DEVICES": "lo"}},
    ]


@needs_nixl
def test_torch_that_is_imported_already_is_left_to_the_library() -> None:
    """NIXL's front imports torch, to see that torch has no CUDA; the probe hides torch where it is not imported yet."""
    pytest.importorskip("torch")
    code = (
        "import sys, torch; from statelink_nixl import *; assert NixlBackend.probe(Options()).ok; sys.modules['torch']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_probe_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    probe = NixlBackend.probe(Options())
    assert (probe.ok, probe.reason) == (False, "NIXL is not installed")
    assert probe.hint.startswith("pip install nixl, ")


@needs_nixl
def test_probe_with_a_broken_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NixlBackend.probe(Options()).ok  # importing NIXL for the first time would put the module back
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    probe = NixlBackend.probe(Options())
    assert not probe.ok
    assert "its import fails: import of nixl._api halted" in probe.reason


@needs_nixl
def test_version_that_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    from nixl import _api

    monkeypatch.delattr(_api.nixl_agent, "check_xfer_state")
    reason = "NIXL is installed, and its import fails: this version of nixl has no nixl_agent.check_xfer_state"
    assert NixlBackend.probe(Options()).reason == reason
    with pytest.raises(BackendUnavailableError, match=reason):
        make(NixlBackend, "nobody")


@needs_nixl
def test_probe() -> None:
    probe = NixlBackend.probe(Options())
    assert probe.ok, probe.reason
    assert importlib.metadata.version("nixl") in probe.details["library"]
    assert probe.reason.startswith(f"{probe.details['library']} with UCX; RDMA devices: ")
    probe = NixlBackend.probe(Options(backends={"UCX": {}, "CARRIER_PIGEON": {}}))
    assert not probe.ok
    assert probe.reason.endswith("has no backend CARRIER_PIGEON")
    assert "UCX" in probe.hint
    probe = NixlBackend.probe(Options(backends={"POSIX": {}}))
    assert (probe.ok, probe.hint) == (False, "add UCX, or another that reaches a process, to `backends`")
    with pytest.raises(BackendUnavailableError, match="POSIX moves bytes to files or object stores"):
        make(NixlBackend, "nobody", {"backends": {"POSIX": {}}})


@needs_nixl
def test_plugin_whose_libraries_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL lists LIBFABRIC wherever its file is; the loader says what is missing, and the others are named."""
    real = ctypes.CDLL

    def load(name: str, *args: Any, **more: Any) -> ctypes.CDLL:
        if "LIBFABRIC" in str(name):
            raise OSError("libfabric.so.1: cannot open shared object file")
        return real(name, *args, **more)

    monkeypatch.setattr(ctypes, "CDLL", load)
    probe = NixlBackend.probe(Options(backends={"UCX": {}, "LIBFABRIC": {}}))
    assert not probe.ok
    assert "a backend LIBFABRIC, which cannot be loaded: libfabric.so.1: cannot open" in probe.reason
    assert "UCX" in probe.hint
    assert "POSIX" not in probe.hint
    with pytest.raises(BackendUnavailableError, match="LIBFABRIC, which cannot be loaded"):
        make(NixlBackend, "nobody", {"backends": {"LIBFABRIC": {}}})
    assert NixlBackend.probe(Options()).ok


@needs_nixl
def test_ucx_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wheel without UCX's own libraries: the loader names the first, and `auto` takes the next backend."""
    import nixl._api as api

    real = Path(api.__file__).parent
    plugin = Path("nixl", "libplugin_UCX.so")
    alone = tmp_path / "made.libs" / plugin
    alone.parent.mkdir(parents=True)
    alone.write_bytes((real.with_name(f"{real.name}.libs") / plugin).read_bytes())
    monkeypatch.setattr(api, "__file__", str(tmp_path / "made" / "_api.py"))
    probe = NixlBackend.probe(Options())
    assert not probe.ok
    assert re.search(r"a backend UCX, which cannot be loaded: lib\S+: cannot open shared object file", probe.reason)
    assert probe.hint.startswith("install what it needs, or NIXL again; ")
    with pytest.raises(BackendUnavailableError, match="UCX, which cannot be loaded"):
        make(NixlBackend, "nobody")
    monkeypatch.setenv("STATELINK_PLUGINS", "statelink-nixl")
    pages = np.zeros((2, 2, 4, 2, 8), np.uint8)
    inventory = state.describe("p", [state.kv_pages({0: (pages[0], pages[1])}, heads=2)])
    with statelink.open({"role": "prefill", "backend": "auto", "inspect": False}, inventory) as link:
        assert link.snapshot()["backend"] == "tcp"
        assert "UCX, which cannot be loaded" in link.snapshot()["rejected"]["nixl"]


@needs_nixl
def test_a_start_that_fails_says_how_to_see_more(capfd: pytest.CaptureFixture[str]) -> None:
    """The library's own log is off, unless the user turns it on. UCX says what it lacks all the same."""
    with pytest.raises(BackendUnavailableError, match=r"NIXL could not be started.*NIXL_ERR_BACKEND") as refused:
        make(NixlBackend, "nobody", {"ucx": {"TLS": "no_such_transport"}})
    assert "'no_such_transport' is not available" in capfd.readouterr().out
    assert refused.value.hint.startswith("with NIXL_LOG_LEVEL=INFO and UCX_LOG_LEVEL=info in the environment, ")


@needs_nixl
@pytest.mark.parametrize("mode", ["strict", "rw"])
def test_options_that_reach_the_library(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads and devices, as the library reports them; the environment is as it was."""
    import nixl._api as api

    modes, agents = [], []
    real = api.nixl_agent_config

    class Agent(api.nixl_agent):  # type: ignore[misc]
        def __init__(self, *settings: object) -> None:
            super().__init__(*settings)
            agents.append(self)

    def config(**settings: Any) -> Any:
        modes.append(settings["sync_mode"].name)
        return real(**settings)

    monkeypatch.setattr(api, "nixl_agent_config", config)
    monkeypatch.setattr(api, "nixl_agent", Agent)
    options = {"devices": ["lo"], "num_threads": 3, "sync_mode": mode, "ucx": {"TLS": "tcp"}}
    backend = make(NixlBackend, "one", options)
    try:
        assert agents.pop().get_backend_params("UCX")["num_threads"] == "3"
        assert modes[-1] == f"NIXL_THREAD_SYNC_{mode.upper()}"
        assert "UCX_NET_DEVICES" not in os.environ
    finally:
        agents.clear()
        backend.close()
    with pytest.raises(BackendUnavailableError, match="NIXL could not be started"):
        make(NixlBackend, "two", {**options, "devices": ["no_such_device"]})


@needs_nixl
def test_library_that_finds_no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it raises then comes from its Python part, and is no error of the library's own."""
    from nixl import _api

    class Bare(_api.nixl_agent):  # type: ignore[misc]
        def __init__(self, *settings: object) -> None:
            raise RuntimeError("No plugins available")

    monkeypatch.setattr(_api, "nixl_agent", Bare)
    assert NixlBackend.probe(Options()).reason == "NIXL does not start: RuntimeError: No plugins available"
    with pytest.raises(BackendUnavailableError, match=r"NIXL could not be started .*No plugins available"):
        make(NixlBackend, "nobody")


@needs_nixl
def test_errors_where_none_are_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are errors of ours, and the agent goes all the same."""
    import nixl._api as api

    agent = stub.installed(monkeypatch)
    region = Region(4096, 10)
    backend = stub.pair((region,), (region,), {"connect_timeout": 0})

    def broken(*_: object) -> bytes:
        raise api.nixlBind.nixlRemoteDisconnectError("NIXL_ERR_ANY")

    def absurd(_: object) -> str:
        raise KeyError("no such state")

    with monkeypatch.context() as patch:
        patch.setattr(agent, "get_agent_metadata", broken)
        with pytest.raises(TransferError, match=r"does not say how peers reach .*NIXL_ERR_ANY"):
            backend.descriptor()
    monkeypatch.setattr(agent, "post", staticmethod(lambda _: "PROC"))
    monkeypatch.setattr(agent, "check", staticmethod(absurd))
    one, zero = np.ones(1, np.uint64), np.zeros(1, np.uint32)
    Blocks(one << np.uint64(12), one << np.uint64(12), one, zero, zero)
    with pytest.raises(KeyError):
        backend.submit("far", Batch(Blocks(one << np.uint64(12), one << np.uint64(12), one, zero, zero), 1, 1))
    with pytest.raises(KeyError):
        backend.close()
    with pytest.raises(TransferError, match="the backend is closed"):
        backend.descriptor()


@needs_nixl
def test_region_that_cannot_be_registered() -> None:
    """CUDA memory, where there is none."""
    array = np.zeros(100, np.uint8)
    backend = make(NixlBackend, "register")
    regions = (Region(array.ctypes.data, 100), Region(array.ctypes.data, 100, "cuda:3"))
    try:
        with pytest.raises(TransferError, match=r"region 1 could not be registered.*100 bytes of cuda:3 at 0x"):
            backend.register(regions)
        with pytest.raises(TransferError, match="kind 'npu:0' is unknown to NIXL"):
            backend.register((Region(1, 1, "npu:0"),))
    finally:
        backend.close()
    with pytest.raises(TransferError, match="the backend is closed"):
        backend.descriptor()


@needs_nixl
@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("tcp", True),
        ("rc, sm", True),
        ("^cuda", True),
        ("^tcp,cuda_copy", True),
        ("tcp,cuda_copy", False),
        ("rc,cuda", False),
        ("all", False),
        ("^tcp", False),
        ("", False),
    ],
)
def test_setting_that_leaves_out_cuda(setting: str, named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of CUDA is refused then, and where the host has an NVIDIA GPU, NIXL does not start at all."""
    import nixl._api as api

    agent = stub.installed(monkeypatch)
    monkeypatch.setenv("UCX_TLS", setting)

    def refuse(*_: object) -> None:
        raise api.nixlBind.nixlBackendError("NIXL_ERR_BACKEND")

    backend = make(NixlBackend, "here")
    with monkeypatch.context() as patch:
        patch.setattr(agent, "register_memory", refuse)
        with pytest.raises(TransferError) as refused:
            backend.register((Region(4096, 100, "cuda:0"),))
        with pytest.raises(TransferError) as host:
            backend.register((Region(4096, 100),))
    backend.close()
    monkeypatch.setattr(agent, "create_backend", refuse)
    with pytest.raises(BackendUnavailableError) as unstarted:
        make(NixlBackend, "here")
    assert (f"TLS={setting} leaves out memory of CUDA" in str(refused.value)) is named
    assert ("add cuda_copy" in refused.value.hint) is named
    assert (f"NIXL refuses TLS={setting}: add cuda_copy" in unstarted.value.hint) is named
    assert "CUDA" not in str(host.value)


@needs_nixl
def test_kinds_of_memory_go_into_transfers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL wants one kind of memory on each side of a transfer; devices may differ from block to block."""
    high = (1 << 64) - 4096
    agent = stub.installed(monkeypatch)
    near = (Region(high, 4096), Region(4096, 4096, "cuda:2"), Region(8192, 4096, "cuda"))
    far = (Region(4096, 4096, "cuda:7"), Region(12288, 4096))
    backend = stub.pair(near, far, {"connect_timeout": 0})
    blocks = Blocks(
        np.array([high + 1, 4100, high, 8192, 4096], np.uint64),
        np.array([4097, 4096, 12288, 12290, 4200], np.uint64),
        np.array([1, 2, 3, 4, 5], np.uint64),
        np.array([0, 1, 0, 2, 1], np.uint32),
        np.array([0, 0, 1, 1, 0], np.uint32),
    )
    assert backend.submit("far", Batch(blocks, 1, 1)).outcome == (True, "", True)
    assert agent.moved == [
        ("WRITE", "DRAM", [[high, 3, 0]], "DRAM", [[12288, 3, 0]]),
        ("WRITE", "DRAM", [[high + 1, 1, 0]], "VRAM", [[4097, 1, 7]]),
        ("WRITE", "VRAM", [[8192, 4, 0]], "DRAM", [[12290, 4, 0]]),
        ("WRITE", "VRAM", [[4100, 2, 2], [4096, 5, 2]], "VRAM", [[4096, 2, 7], [4200, 5, 7]]),
    ]
    backend.close()
