"""What can be told of the backend without a peer: its declaration, its options, and its probe."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plugins.ascend.tests.library import allocator, environment

from statelink.backend import MemoryKinds, Verdict
from statelink.testing import bare_machine
from statelink_ascend import AscendBackend, Options
from statelink_conformance import PackageTests


class TestPackage(PackageTests):
    backend = "ascend"
    library = ("memfabric_hybrid",)
    environment = environment()
    memory = "npu:0"
    allocator = allocator()
    probes_elsewhere = True
    refused_options = [
        {"port": 1},
        {"data_op_type": "SDMA or so"},
        {"data_op_type": 1},
        {"device_id": -1},
        {"data_op_type": "HOST_RDMA"},
        {"data_op_type": "HOST_RDMA", "nic": "mlx5_0"},
        {"connect_timeout": 0},
    ]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with nothing, but for what a test puts there; first on its path is ``packages``."""
    real = importlib.util.find_spec

    def find(name: str, *arguments: Any) -> Any:
        ours = name != "memfabric_hybrid" or (tmp_path / "packages" / f"{name}.py").exists()
        return real(name, *arguments) if ours else None

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    put(tmp_path, "etc/ascend_install.info", "Driver_Install_Path_Param=/ascend\n")
    with bare_machine(tmp_path):
        yield tmp_path


def put(machine: Path, name: str, text: str = "") -> None:
    (machine / name).parent.mkdir(parents=True, exist_ok=True)
    (machine / name).write_text(text)


def test_machine_without_anything(machine: Path) -> None:
    put(machine, "dev/davinci_manager")
    probe = AscendBackend.probe(Options())
    assert not probe.ok
    assert probe.reason.startswith("MemFabric cannot run here: the Python package memfabric_hybrid is not installed")
    assert probe.reason.split("; ")[1:] == [
        f"there is no NPU: no {machine / 'dev'}/davinci0, nor any other number",
        f"there is no NPU driver: {machine / 'ascend/driver/version.info'} is absent or names no version",
        "CANN is not set up: ASCEND_HOME_PATH is not set (source its set_env.sh)",
        "libascend_hal.so cannot be loaded: the driver's libraries are not on the loader's path",
    ]
    assert probe.hint.startswith("pip install memfabric-hybrid on")
    assert "memfabric-hybrid<" in "".join(importlib.metadata.requires("statelink-ascend") or ())
    assert probe.details == {"memfabric": "none", "devices": "none", "driver": "none", "log": "none"}


LIBRARY = """
import sys
print("a log line", flush=True)
{before}
class TransDataOpType:
    SDMA = 1
class TransferEngine:
    def initialize(self, *arguments):
        return {code}
    def get_rpc_port(self):
        return {port}
    batch_register_memory = batch_transfer_sync_write = destroy = unInitialize = initialize
def get_and_clear_last_err_msg():
    return {text!r}
"""


@pytest.mark.parametrize(
    ("before", "code", "port", "text", "reason"),
    [
        ("", -1, 0, "", "MemFabric's initialize returned -1 (failed)"),
        ("", 7, 1, "", "MemFabric's initialize returned 7"),
        ("", -2004, 1, "too late", "MemFabric's initialize returned -2004 (timeout): too late"),
        ("", 0, 0, "", "it started without a port, which it says is 0"),
        ("raise OSError('libmf_smem.so: no')", 0, 1, "", "OSError: libmf_smem.so: no"),
        ("import os; os.abort()", 0, 1, "", "its start ended the process: SIGABRT"),
        ("sys.exit(3)", 0, 1, "", "its start ended the process: exit status 3"),
    ],
)
def test_library_that_does_not_start(machine: Path, before: str, code: int, port: int, text: str, reason: str) -> None:
    """Whatever it does, it does it elsewhere; what the machine lacks follows."""
    put(machine, "packages/memfabric_hybrid.py", LIBRARY.format(before=before, code=code, port=port, text=text))
    probe = AscendBackend.probe(Options())
    assert probe.reason.split("; ")[:2] == [
        f"MemFabric cannot run here: {reason}",
        f"there is no NPU: no {machine / 'dev'}/davinci0, nor any other number",
    ]
    assert not probe.ok
    assert (probe.details["memfabric"], probe.details["log"]) == ("9.9", "a log line")


def test_library_that_lacks_something(machine: Path) -> None:
    put(machine, "packages/memfabric_hybrid.py", "class TransferEngine: initialize = destroy = print")
    probe = AscendBackend.probe(Options(data_op_type="DEVICE_URMA"))
    lacks = [f"TransferEngine.{name}" for name in ("get_rpc_port", "batch_register_memory")]
    assert f"ImportError: this version of memfabric_hybrid has no {', '.join(lacks)}, " in probe.reason
    assert "TransferEngine.unInitialize, TransDataOpType.DEVICE_URMA, get_and_clear_last_err_msg" in probe.reason


def test_library_that_starts(machine: Path) -> None:
    """Then nothing is looked for: the library knows best."""
    put(machine, "packages/memfabric_hybrid.py", LIBRARY.format(before="", code=0, port=1, text=""))
    probe = AscendBackend.probe(Options())
    assert (probe.ok, probe.reason) == (True, "memfabric_hybrid 9.9 starts here, with SDMA")


def test_machine_with_everything_and_a_library_that_fails(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dev/davinci0", "dev/davinci12", "lib/libascend_hal.so"):
        put(machine, name)
    put(machine, "packages/memfabric_hybrid.py", LIBRARY.format(before="", code=-1, port=0, text=""))
    put(machine, "ascend/driver/version.info", "Version=25.2.0\nInnerversion=V100R001C22\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(machine / "cann"))
    probe = AscendBackend.probe(Options())
    assert probe.reason.endswith(f"; CANN is incomplete: {machine / 'cann'}/lib64/libascendcl.so is absent")
    put(machine, "cann/lib64/libascendcl.so")
    probe = AscendBackend.probe(Options())
    assert (probe.ok, probe.reason) == (False, "MemFabric cannot run here: MemFabric's initialize returned -1 (failed)")
    assert (probe.details["devices"], probe.details["driver"]) == ("davinci0, davinci12", "V100R001C22")


def test_driver_without_an_install_file(machine: Path) -> None:
    (machine / "etc/ascend_install.info").unlink()
    probe = AscendBackend.probe(Options())
    assert f"there is no NPU driver: {machine}/usr/local/Ascend/driver/version.info is absent" in probe.reason


def test_diagnosis(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *needs, environment = AscendBackend.diagnose(Options())
    assert {check.verdict for check in needs} == {Verdict.PROBLEM}
    assert len(needs) == 5
    for name in ("dev/davinci0", "lib/libascend_hal.so", "cann/lib64/libascendcl.so", "packages/memfabric_hybrid.py"):
        put(machine, name)
    put(machine, "ascend/driver/version.info", "Version=25.2.0\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(machine / "cann"))
    has, environment = AscendBackend.diagnose(Options())
    assert (has.verdict, has.found) == (Verdict.OK, "memfabric_hybrid 9.9, davinci0, driver 25.2.0")
    assert f"ASCEND_HOME_PATH={machine / 'cann'}" in environment.found


@pytest.mark.parametrize(
    ("kind", "word"), [("SDMA", "sdma"), ("HOST_RDMA", "rdma"), ("DEVICE_RDMA", "rdma"), ("DEVICE_URMA", "urma")]
)
def test_the_transport_is_what_the_options_name(kind: str, word: str) -> None:
    assert AscendBackend.transports(Options(data_op_type=kind, nic="tcp://192.0.2.1:1")) == {word}


@pytest.mark.parametrize(
    ("options", "kinds"),
    [(Options(), {"npu"}), (Options(data_op_type="HOST_RDMA", nic="tcp://192.0.2.1:1"), {"npu", "dram"})],
)
def test_the_memory_is_what_the_options_allow(options: Options, kinds: set[str]) -> None:
    """So that ``auto`` does not pick it for what it then refuses."""
    assert issubclass(AscendBackend, MemoryKinds)
    assert AscendBackend.memory_kinds(options) == kinds <= AscendBackend.capabilities.memory_kinds


@pytest.mark.usefixtures("machine")
def test_probe_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[Path]:
        raise OSError("the disk is gone")

    monkeypatch.setattr(Path, "glob", broken)
    probe = AscendBackend.probe(Options())
    assert (probe.ok, probe.reason) == (False, "looking for what MemFabric needs failed: the disk is gone")


STARTS = """
import logging, sys
from statelink.backend import BackendContext
from statelink.errors import BackendUnavailableError
from statelink_ascend import AscendBackend, Options
logging.basicConfig(level=logging.DEBUG, stream=sys.stderr, format="%(name)s %(levelname)s %(message)s")
try:
    AscendBackend(BackendContext(options=Options(), link="here", role="prefill"))
    print("started", file=sys.stderr)
except BackendUnavailableError as error:
    print(error.reason.cause.partition("; ")[0], file=sys.stderr)
"""


TWICE = """
from statelink.backend import BackendContext
from statelink_ascend import AscendBackend, Options
for _ in range(2):
    AscendBackend(BackendContext(options=Options(), link="here", role="decode")).close()
"""


def started(code: str = STARTS, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if "MF_LOG_LEVEL" not in name}
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    everything = {**kept, **path, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=everything, check=True, timeout=60
    )


@pytest.mark.usefixtures("standin")
def test_the_log_goes_to_a_logger(library: dict[str, str]) -> None:
    """Traces, too, which the library writes whatever its level; unless somebody has set that."""
    quiet = started(**library)
    assert quiet.stdout == ""
    assert "statelink.ascend DEBUG [SMEM " in quiet.stderr
    assert quiet.stderr.endswith("started\n")
    loud = started(**library, MF_LOG_LEVEL="3")
    assert " TRACE [" in loud.stdout
    assert "statelink.ascend" not in loud.stderr


def test_a_second_link_of_a_process_prints_nothing(library: dict[str, str]) -> None:
    """The library warns at each start but the first, before its level can be set."""
    done = started(TWICE, **library)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.skipif(importlib.util.find_spec("memfabric_hybrid") is None, reason="memfabric_hybrid is not installed")
def test_the_librarys_own_log_does_not_reach_standard_output() -> None:
    """That of the real one, wherever it is: it would write ten errors where there is no NPU."""
    done = started()
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(("started", "MemFabric's initialize returned -1"))


def commanded(library: dict[str, str], *arguments: str) -> tuple[int, str]:
    """How the command line ends, and what it says, where a process finds the library."""
    command = [sys.executable, "-c", "from statelink.cli import main; main()", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **library}, check=False, timeout=110
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.usefixtures("standin")
@pytest.mark.parametrize(
    ("choice", "verdict", "found"),
    [
        ((), "not applicable", ""),
        (("--memory", "dram"), "problem", ""),
        (("--memory", "npu:0", "--allocator", "npu_memory:Memory"), "ok", "6144 KiB of npu:0 in "),
    ],
)
def test_doctor_moves_what_the_engine_would(
    library: dict[str, str], choice: tuple[str, ...], verdict: str, found: str
) -> None:
    """Host memory is not this backend's without HOST_RDMA: that is no problem, and an NPU's moves."""
    _, said = commanded(library, "doctor", "ascend", "--json", *choice)
    (check,) = [each for each in json.loads(said)["checks"] if each["what"] == "loopback transfer"]
    assert check["verdict"] == verdict
    assert check["found"].startswith(found)


@pytest.mark.usefixtures("standin")
def test_the_kit_runs_over_an_npus_memory_from_the_command_line(library: dict[str, str]) -> None:
    choice = ("--memory", "npu:0", "--allocator", "npu_memory:Memory", "-k", "every_alignment or class_is_complete")
    status, said = commanded(library, "conform", "ascend", *choice)
    assert status == 0, said
    assert "ascend: 2 passed in" in said
    status, said = commanded(library, "conform", "ascend")
    assert status == 1
    assert "cannot register memory of kind 'dram': with these options it registers npu\nhint: --memory" in said
