"""What can be told of the backend without a peer."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.backend_peer import make
from tests.helpers.ports import consecutive_ports

from statelink.backend import BackendContext, Region
from statelink.errors import BackendUnavailableError, TransferError
from statelink_conformance import PackageTests
from statelink_mooncake import MooncakeBackend, Options

HERE = MooncakeBackend.probe(Options())
needs_mooncake = pytest.mark.skipif(not HERE.ok, reason=f"{HERE.reason}; {HERE.hint}")


class TestPackage(PackageTests):
    backend = "mooncake"
    library = ("mooncake",)
    refused_options = [
        {"tls": "tcp"},
        {"protocol": ""},
        {"protocol": "a b"},
        {"devices": 1},
        {"mc": {"TCP_PROTO": "1"}},
        {"mc": {"LOG_DIR": "."}},
        {"mc": {"FORCE_TCP": "1"}},
        {"mc": {"MC_MTU": "4096"}},
        {"mc": {"mtu": "4096"}},
        {"mc": {"MIN_RPC_PORT": "7200"}},
        {"mc": {"MAX_RPC_PORT": "7299"}},
        {"port": 7200},  # over TCP, an engine listens at two
        {"port": "7299-7200"},
        {"port": "7200-"},
    ]


def test_probe_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    probe = MooncakeBackend.probe(Options())
    assert (probe.ok, probe.reason) == (False, "Mooncake's TransferEngine is not installed")
    builds = re.findall(r"mooncake[a-z0-9-]+", probe.hint)
    assert builds == [
        "mooncake-transfer-engine-non-cuda",
        "mooncake-transfer-engine",
        "mooncake-transfer-engine-cuda13",
    ]
    # The extras bring the same ones.
    required = "".join(importlib.metadata.requires("statelink-mooncake") or ())
    for build in builds:
        assert f"{build}<0.3.14" in required


def test_probe_without_shared_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the Debian packages of all that are missing, not only of the one that the loader names."""

    class Broken:
        def find_spec(self, name: str, *args: object) -> None:
            if name.startswith("mooncake"):
                raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")

    def load(name: str) -> None:
        if name in ("libibverbs.so.1", "libnuma.so.1"):
            raise OSError(name)

    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    monkeypatch.setattr(ctypes, "CDLL", load)
    probe = MooncakeBackend.probe(Options())
    assert not probe.ok
    assert probe.reason.endswith(
        "its import fails: libibverbs.so.1: cannot open shared object file: No such file or directory"
    )
    assert probe.hint == "sudo apt-get install -y libibverbs1 libnuma1"


@pytest.mark.parametrize("library", ["libcuda.so.1", "libcudart.so.13"])
def test_probe_of_a_build_for_another_machine(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA or the driver is missing, it names the builds."""

    class Broken:
        def find_spec(self, name: str, *args: object) -> None:
            if name.startswith("mooncake"):
                raise ImportError(f"{library}: cannot open shared object file: No such file or directory")

    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    probe = MooncakeBackend.probe(Options())
    assert not probe.ok
    assert f"its import fails: {library}: cannot open" in probe.reason
    assert probe.hint.startswith("a build for CUDA needs that version of CUDA, and NVIDIA's driver.")
    assert "pip install mooncake-transfer-engine-non-cuda" in probe.hint


@needs_mooncake
def test_version_that_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    from mooncake import engine

    class Older:
        pass

    monkeypatch.setattr(engine, "TransferEngine", Older)
    probe = MooncakeBackend.probe(Options())
    assert "this version of Mooncake has no TransferEngine.initialize, " in probe.reason
    with pytest.raises(BackendUnavailableError, match=r"this version of Mooncake has no .*\nhint: install a newer one"):
        make(MooncakeBackend, "nobody")


@needs_mooncake
@pytest.mark.parametrize(
    ("version", "ok"), [("0.3.9", False), ("0.3.11.post1", False), ("0.3.12", True), ("0.10.0", True)]
)
def test_release_that_reports_writes_too_early(version: str, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    probe = MooncakeBackend.probe(Options())
    assert probe.ok is ok
    if not ok:
        assert probe.reason.endswith(f"{version} reports a write over TCP as done before its bytes are there")
        assert probe.hint == "install a newer one, on both sides"


@needs_mooncake
def test_probe() -> None:
    assert HERE.reason.startswith("mooncake-transfer-engine")
    assert HERE.details["library"] in HERE.reason


@needs_mooncake
def test_the_environment_is_as_it_was_once_an_engine_has_started() -> None:
    backend = make(MooncakeBackend, "one", {"protocol": "tcp"})
    backend.close()
    assert "MC_FORCE_TCP" not in os.environ
    with pytest.raises(TransferError, match="the backend is closed"):
        backend.descriptor()


@needs_mooncake
def test_regions_that_cannot_be_registered() -> None:
    array = np.zeros(100, np.uint8)
    address = array.ctypes.data
    backend = make(MooncakeBackend, "register")
    try:
        with pytest.raises(TransferError, match=r"region 1 could not be .*50 bytes of dram at .*-7 \(it overlaps"):
            backend.register((Region(address, 60), Region(address + 50, 50)))
        with pytest.raises(TransferError, match=r"region 0 could not be .* of npu:0 at .* does not know such memory"):
            backend.register((Region(address, 60, "npu:0"),))
        backend.register(())
    finally:
        backend.close()


IMPORTS = "from statelink_mooncake import MooncakeBackend\nfrom tests.helpers.backend_peer import make\n"
REFUSED = f"""
{IMPORTS}
make(MooncakeBackend, 'first')  # which imports the library with its settings
import os, sys
from mooncake import engine as library
class Engine(library.TransferEngine):
    def initialize(self, *settings):
        status = super().initialize(*settings)
        os.write(2, b'an engine starts\\n')
        self.transfer_sync_write('127.0.0.1:1', 1, 1, 1)
        return int(sys.argv[1])
library.TransferEngine = Engine
"""
"""An engine that meets an error in its start, which ends with the status that is given."""


@needs_mooncake
def test_start_that_fails_prints_why() -> None:
    """It is tried once more, aloud."""
    done = run(f"{REFUSED}make(MooncakeBackend, 'nobody')", "-1")
    _, first, second = done.stderr.split("an engine starts\n")
    assert "Connection refused" not in first
    assert "Connection refused" in second
    assert "it returned -1, and printed why to standard error" in second


@needs_mooncake
def test_what_the_library_prints_is_kept_where_it_is_asked_for() -> None:
    """Errors after the start are printed, and so is everything with ``MC_LOG_LEVEL=INFO``."""
    moved = "engine = library.TransferEngine()\nassert engine.initialize('127.0.0.1', 'P2PHANDSHAKE', 'tcp', '') == 0\n"
    done = run(f"{REFUSED}{moved}", "0")
    assert done.returncode == 0, done.stderr
    assert "Connection refused" in done.stderr
    aloud = run(f"import os; os.environ['MC_LOG_LEVEL'] = 'INFO'\n{IMPORTS}make(MooncakeBackend, 'one')")
    assert "Local segment descriptor not found" in aloud.stderr


@needs_mooncake
def test_settings_of_the_library() -> None:
    """A link without any joins those of the process; one cannot have others."""
    done = run(
        f"{IMPORTS}"
        "make(MooncakeBackend, 'one', {'mc': {'TRANSFER_TIMEOUT': '10'}}), make(MooncakeBackend, 'two')\n"
        "make(MooncakeBackend, 'three', {'mc': {'TRANSFER_TIMEOUT': '20'}})\n"
    )
    assert done.returncode == 1
    assert "Mooncake was imported with another MC_TRANSFER_TIMEOUT, and reads it once" in done.stderr


@needs_mooncake
def test_engines_listen_in_their_range() -> None:
    """Each takes two ports of it; one that finds none is refused, with the range; another range is refused, too."""
    first, *_, last = ports = consecutive_ports(4)
    done = run(
        f"{IMPORTS}from tests.helpers.ports import own_ports\n"
        f"options = {{'port': '{first}-{last}'}}\n"
        "opened = [make(MooncakeBackend, link, options) for link in '12']\n"
        "print(sorted(own_ports()))\n"
        "for options in (options, {'port': '7200-7299'}):\n"
        "    try:\n"
        "        make(MooncakeBackend, '3', options)\n"
        "    except Exception as error:\n"
        "        print(error)\n"
    )
    assert done.stdout.startswith(f"{list(ports)}\n"), done.stderr
    assert f"hint: over TCP, it needs two free ports of {first}-{last}" in done.stdout
    assert "Mooncake was imported with another MC_MIN_RPC_PORT, MC_MAX_RPC_PORT, and reads it once" in done.stdout


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("MC_LOG_DIR", "/tmp", "Mooncake ends the process when it is imported with MC_LOG_DIR set"),
        ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "1000", "is less than the 1024 entries that one batch may have"),
    ],
)
def test_environment_that_does_harm(name: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mooncake.engine", raising=False)
    monkeypatch.setenv(name, value)
    probe = MooncakeBackend.probe(Options())
    assert not probe.ok
    assert reason in probe.reason


@needs_mooncake
@pytest.mark.skipif(not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists(), reason="this host has no IPv6")
def test_internet_protocol_6(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: the library reads the family once, when it is imported."""
    monkeypatch.delenv("MC_USE_IPV6", raising=False)
    context = BackendContext(options=Options(), link="six", host="::1")
    with pytest.raises(
        BackendUnavailableError, match=r"host is ::1.*\nhint: set mc = .*start the process with MC_USE_IPV6=1"
    ):
        MooncakeBackend(context)
    done = run(
        "import numpy as np\n"
        "from tests.helpers.backend_peer import move\n"
        "from statelink_mooncake import MooncakeBackend\n"
        "from statelink.backend import BackendContext, Blocks, Region\n"
        "options = MooncakeBackend.Options(mc={'USE_IPV6': '1'})\n"
        "one, two = (MooncakeBackend(BackendContext(options=options, link=link, host='::1')) for link in '12')\n"
        "array = np.arange(20, dtype=np.uint8)\n"
        "regions = (Region(array.ctypes.data, 20),)\n"
        "one.register(regions), two.register(regions)\n"
        "one.connect('2', two.descriptor(), regions)\n"
        "address, zero = np.array([array.ctypes.data], np.uint64), np.array([0], np.uint32)\n"
        "ten = np.array([10], np.uint64)\n"
        "(transfer,) = move(one, '2', Blocks(address, address + ten, ten, zero, zero))\n"
        "assert transfer.outcome.ok and (array[:10] == array[10:]).all()\n"
    )
    assert done.returncode == 0, done.stderr


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
