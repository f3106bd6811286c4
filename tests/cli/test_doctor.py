"""``statelink doctor``: every line true, on machines that are made up and over real transfers."""

from __future__ import annotations

import json
import resource
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from tests.helpers.system import System

from statelink.backend import SubmitMode
from statelink.cli import main
from statelink.tcp import TcpBackend

if TYPE_CHECKING:
    from pathlib import Path

    from tests.registry.sites import Site

OVER_TCP = """
from statelink.backend import Check, Probe, Verdict
from statelink.tcp import TcpBackend


class Made(TcpBackend):
    name = "good"

    @classmethod
    def diagnose(cls, options):
        {diagnose}

{more}
"""
LOOKS = "return [Check(what='device [0]', verdict=Verdict.{}, found='it is there', hint='plug it in')]"


def made(site: Site, diagnose: str = LOOKS.format("OK"), more: str = "") -> None:
    site.backend("good", source=OVER_TCP.format(diagnose=diagnose, more=more))


def lines(*arguments: str, expect: int) -> dict[str, dict[str, Any]]:
    """What is said of the one backend that is named."""
    result = CliRunner().invoke(main, ["doctor", *arguments, "--json"])
    assert result.exit_code == expect, result.output
    said = json.loads(result.stdout)
    assert said["ok"] is (expect == 0)
    return {each["what"]: each for each in said["checks"] if each["about"] != "machine"}


def test_everything_is_looked_at_down_to_bytes_that_really_moved(site: Site) -> None:
    made(site)
    found = lines("good", "-o", "same_host_copy=false", expect=0)
    assert list(found) == ["backend", "device [0]", "probe", "stopped peers", "loopback transfer"]
    assert {each["verdict"] for each in found.values()} == {"ok"}
    assert found["backend"]["found"].startswith("statelink-good 0.1, statelink_good:Made")
    assert "6144 KiB" in found["loopback transfer"]["found"]
    assert "transport: socket" in found["loopback transfer"]["found"]  # the option reached it


def test_options_are_checked(site: Site) -> None:
    made(site)
    found = lines("good", "-o", "same_host_cop=false", expect=1)
    assert found["backend"]["hint"] == "did you mean 'same_host_copy'?"


def test_a_problem_is_printed_with_what_to_do(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    made(site, LOOKS.format("PROBLEM"))
    result = CliRunner().invoke(main, ["doctor", "good", "--no-loopback"])
    assert result.exit_code == 1
    words = " ".join(result.output.split())
    assert "device [0] problem it is there hint: plug it in" in words
    assert "1 problem" in words


@pytest.mark.parametrize(
    ("more", "said"),
    [
        # The two sides as a broken library would have them: silence, lies and death.
        ("    def submit(self, peer, batch):\n        import os; os.abort()", "SIGABRT"),
        (
            "    def submit(self, peer, batch):\n"
            "        from statelink.backend import Outcome, Transfer\n"
            "        return Transfer(Outcome(True))\n\n"
            "    def when_landed(self, peer, room, generation, nbytes, then):\n"
            "        then()",
            "other bytes arrived than were sent",
        ),
        ("    def __init__(self, context):\n        print('nothing to see here'); raise OSError('gone')", "gone"),
    ],
)
def test_a_transfer_that_goes_wrong_is_a_problem_of_its_line(site: Site, more: str, said: str) -> None:
    made(site, more=more)
    found = lines("good", expect=1)
    assert {what for what, each in found.items() if each["verdict"] == "problem"} == {"loopback transfer"}
    assert said in found["loopback transfer"]["found"]
    assert 'File "' not in found["loopback transfer"]["found"], "stacks are no words of a library"


def test_a_transfer_that_hangs_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    more = "    def __init__(self, context):\n        import time; time.sleep(100)"
    made(site, more=more)
    real, start = time.monotonic, time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: start + 20 * (real() - start))  # it waits for a minute
    transfer = lines("good", expect=1)["loopback transfer"]
    assert transfer["found"].startswith("prefill came to no end within 60 seconds")
    assert transfer["hint"].startswith("a busy machine may be the reason: run it again")


FOR_NPUS = """
    capabilities = dataclasses.replace(TcpBackend.capabilities, memory_kinds=frozenset({"dram", "npu"}))

    @classmethod
    def memory_kinds(cls, options):
        return frozenset({"npu"} if options.same_host_copy else {"dram"})
"""


def test_memory_that_a_backend_does_not_move_is_not_asked_of_it(site: Site) -> None:
    """Where its options leave host memory out, that is no problem, unless somebody asks for it."""
    made(site, more=f"    import dataclasses{FOR_NPUS}")
    moved = lines("good", expect=0)["loopback transfer"]
    assert moved["verdict"] == "not applicable"
    assert "memory of kind 'dram' would be moved: with these options it registers npu" in moved["found"]
    assert "--memory" in moved["hint"]
    asked = lines("good", "--memory", "dram", expect=1)["loopback transfer"]
    assert (asked["verdict"], asked["found"]) == ("problem", moved["found"])
    assert "KiB of dram in" in lines("good", "-o", "same_host_copy=false", expect=0)["loopback transfer"]["found"]


NPUS_ALONE = """
    import dataclasses
    capabilities = dataclasses.replace(TcpBackend.capabilities, memory_kinds=frozenset({'npu'}))

    def register(self, regions):
        from statelink.backend import Region
        super().register([Region(each.address, each.nbytes) for each in regions])
"""
HOST = """
import ctypes
import numpy as np

class Memory:
    def __init__(self, kind, nbytes):
        self.bytes = np.zeros(nbytes, np.uint8)
        self.address = self.bytes.ctypes.data
    def write(self, at, data):
        self.bytes[at : at + data.size] = data.reshape(-1)
    def read(self, at, data):
        data.reshape(-1)[:] = self.bytes[at : at + data.size]
    def __del__(self):
        ctypes.memset(self.address, 0, len(self.bytes))
"""


def test_memory_of_a_device_is_moved(site: Site) -> None:
    made(site, more=NPUS_ALONE)
    (site.folder / "made_memory.py").write_text(HOST)
    moved = lines("good", "--memory", "npu:0", "--allocator", "made_memory:Memory", expect=0)["loopback transfer"]
    assert "6144 KiB of npu:0 in" in moved["found"]
    nowhere = lines("good", "--memory", "npu:0", "--allocator", "no_such_module:Memory", expect=1)["loopback transfer"]
    assert "no_such_module:Memory cannot allocate memory of kind 'npu:0'" in nowhere["found"]


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({}, "any number of them delays nobody else"),
        ({"submit_mode": SubmitMode.BLOCKING}, "one may delay all others until the library gives it up"),
        ({"submit_mode": SubmitMode.BLOCKING, "stalled_peers": 5}, "up to 5 at once delay nobody else"),
        ({"submit_mode": SubmitMode.BLOCKING, "stalled_peers": None}, "any number of them delays nobody else"),
        ({"thread_safe": False}, "one may delay all others until the library gives it up"),
    ],
)
def test_what_stopped_peers_cost_is_said(monkeypatch: pytest.MonkeyPatch, declared: dict[str, Any], said: str) -> None:
    monkeypatch.setattr(TcpBackend, "capabilities", replace(TcpBackend.capabilities, **declared))
    found = lines("tcp", "--no-loopback", expect=0)["stopped peers"]["found"]
    assert found.startswith(f"declared: {said}")


def test_what_cannot_run_is_not_tried(site: Site) -> None:
    made(
        site,
        "raise RuntimeError('[oops]')",
        "    @classmethod\n"
        "    def probe(cls, options):\n"
        "        return Probe(ok=False, reason='no card', hint='buy one')",
    )
    found = lines("good", expect=1)
    assert {what: each["verdict"] for what, each in found.items()} == {
        "backend": "ok",
        "diagnosis": "problem",
        "probe": "problem",
        "loopback transfer": "not applicable",
    }
    assert (found["probe"]["found"], found["probe"]["hint"]) == ("not usable here: no card", "buy one")


NO_CARD = """
    @classmethod
    def probe(cls, options):
        return Probe(ok=False, reason='no card', hint='buy one')
"""


@pytest.mark.parametrize(
    ("arguments", "configured", "verdict"),
    [([], "", "not applicable"), ([], "tcp", "not applicable"), ([], "good", "problem"), (["good"], "", "problem")],
)
def test_what_cannot_run_is_a_problem_to_whom_means_to_use_it(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], configured: str, verdict: str
) -> None:
    """A package whose hardware another host has is not; what to do about it is said all the same."""
    monkeypatch.setenv("COLUMNS", "200")
    made(site, LOOKS.format("PROBLEM"), NO_CARD)
    if configured:
        monkeypatch.setenv("STATELINK_ROLE", "decode")
        monkeypatch.setenv("STATELINK_BACKEND", configured)
    expect = 1 if verdict == "problem" else 0
    (tmp_path / "dev/shm").mkdir(parents=True)
    with System(tmp_path):  # what else this machine lacks is not the point
        said = CliRunner().invoke(main, ["doctor", *arguments, "--no-loopback"])
    words = " ".join(said.output.split())
    assert said.exit_code == expect, said.output
    assert f"device [0] {verdict} it is there hint: plug it in probe {verdict} not usable here: no card" in words
    code = "[backend.unavailable] " if verdict == "problem" else ""
    assert f"no card {code}hint: buy one" in words


def test_a_diagnosis_that_raises_is_a_problem_wherever_it_runs(site: Site) -> None:
    """It is the package's, and not the machine's."""
    made(site, "raise RuntimeError('[oops]')", NO_CARD)
    result = CliRunner().invoke(main, ["doctor", "--no-loopback", "--json"])
    checks = json.loads(result.stdout)["checks"]
    verdicts = {each["what"]: each["verdict"] for each in checks if each["about"] == "good"}
    assert (result.exit_code, verdicts["diagnosis"], verdicts["probe"]) == (1, "problem", "not applicable")


def test_broken_packages_stop_nobody(site: Site) -> None:
    site.backend("broken", source="raise OSError('cannot open [lib]')")
    site.backend("old", api=0)
    result = CliRunner().invoke(main, ["doctor", "--no-loopback", "--json"])
    assert result.exit_code == 1
    said = {each["about"]: each for each in json.loads(result.stdout)["checks"]}
    assert "cannot open [lib]" in said["broken"]["found"]
    assert said["old"]["hint"] == "pip install -U statelink-old"
    assert said["tcp"]["verdict"] == "ok"
    absent = lines("nixl", expect=1)["backend"]
    assert absent["hint"].endswith("statelink-nixl to the environment variable STATELINK_PLUGINS") or absent[
        "hint"
    ].startswith("pip install")


# Machines that are made up.


def machine(root: Path, *, port: str = "4: ACTIVE", files: dict[str, str] | None = None) -> Path:
    """A host with one RDMA device, and the files that a test adds."""
    texts = {
        "sys/class/infiniband/mlx5_0/ports/1/state": port,
        "dev/infiniband/uverbs0": "",
        "sys/class/net/eth0/carrier": "1",
        "sys/class/net/eth0/speed": "100000",
        "sys/class/net/lo/carrier": "1",
        "sys/class/net/eth1/carrier": "0",
        "dev/shm/x": "",
        **(files or {}),
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def looked(root: Path) -> dict[str, dict[str, str]]:
    """What is said of a machine, by what it is about."""
    with System(root):
        result = CliRunner().invoke(main, ["doctor", "tcp", "--no-loopback", "--json"])
    return {each["what"]: each for each in json.loads(result.stdout)["checks"] if each["about"] == "machine"}


def test_a_machine_that_has_everything(tmp_path: Path) -> None:
    files = {
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue",
        "dev/nvidia0": "",
        "dev/nvidia1": "",
        "dev/nvidiactl": "",
    }
    found = looked(machine(tmp_path, files=files))
    assert (found["RDMA devices"]["verdict"], found["RDMA devices"]["found"]) == ("ok", "mlx5_0/1 active")
    assert found["/dev/infiniband"]["found"] == "uverbs0"
    assert found["network"]["found"] == "eth0 (100000 Mbit/s)"
    assert found["accelerators"]["found"] == "2 of NVIDIA, driver 550.54.15"


@pytest.mark.parametrize(
    ("kernel", "files", "verdict", "says"),
    [
        ("NVIDIA UNIX x86_64 Kernel Module  550.54.15", {}, "problem", "copied through the host"),
        (
            "NVIDIA UNIX x86_64 Kernel Module  550.54.15",
            {"sys/module/nvidia_peermem/refcnt": "0"},
            "ok",
            "nvidia_peermem",
        ),
        ("NVIDIA UNIX Open Kernel Module for x86_64  580.159.04", {}, "ok", "dma-buf"),
        (
            "NVIDIA UNIX Open Kernel Module for x86_64  580.159.04",
            {"sys/kernel/iommu_groups/0/type": "DMA"},
            "ok",
            "the IOMMU has 1 groups",
        ),
    ],
)
def test_whether_network_cards_reach_graphics_cards(
    tmp_path: Path, kernel: str, files: dict[str, str], verdict: str, says: str
) -> None:
    found = looked(machine(tmp_path, files={"proc/driver/nvidia/version": f"NVRM version: {kernel}", **files}))
    direct = found["GPUDirect RDMA"]
    assert direct["verdict"] == verdict
    assert says in direct["found"]
    assert bool(direct["hint"]) is (verdict == "problem" or "IOMMU" in says)


def test_what_a_machine_lacks(tmp_path: Path) -> None:
    root = machine(tmp_path, port="1: DOWN", files={"proc/driver/nvidia/version": "NVRM 550.54"})
    (root / "dev/infiniband/uverbs0").unlink()
    found = looked(root)
    for what in ("RDMA devices", "/dev/infiniband", "accelerators"):
        assert found[what]["verdict"] == "problem", what
        assert found[what]["hint"], what
    assert "mlx5_0/1 down" in found["RDMA devices"]["found"]


def test_an_empty_machine_has_no_problem_but_shared_memory(tmp_path: Path) -> None:
    found = looked(tmp_path)
    assert {what for what, check in found.items() if check["verdict"] == "problem"} == {"/dev/shm"}
    assert found["network"]["verdict"] == "not applicable"


def test_an_allocator_whose_memory_many_libraries_refuse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert looked(tmp_path)["allocator"]["verdict"] == "not applicable"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    check = looked(tmp_path)["allocator"]
    assert check["verdict"] == "problem"
    assert check["hint"].startswith("set expandable_segments:False in PYTORCH_ALLOC_CONF, ")


@pytest.mark.parametrize(
    ("device", "limit", "verdict"),
    [
        (False, 64 << 10, "not applicable"),
        (True, 8 << 20, "problem"),
        (True, 64 << 30, "ok"),
        (True, resource.RLIM_INFINITY, "ok"),
    ],
)
def test_locked_memory_matters_where_a_card_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: bool, limit: int, verdict: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    check = looked(machine(tmp_path) if device else tmp_path)["locked memory"]
    assert check["verdict"] == verdict
    assert bool(check["hint"]) is (verdict == "problem")


def test_the_configuration_in_the_environment_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def checked() -> dict[str, str]:
        return looked(tmp_path)["configuration"]

    monkeypatch.setenv("STATELINK_ROLE", "decode")
    monkeypatch.setenv("STATELINK_BACKEND", "auto")
    assert checked()["verdict"] == "ok"
    monkeypatch.setenv("STATELINK_THREADS", "none")
    check = checked()
    assert (check["verdict"], "STATELINK_THREADS" in check["found"]) == ("problem", True)
    for name in ("ROLE", "BACKEND", "THREADS"):
        monkeypatch.delenv(f"STATELINK_{name}")
    assert checked()["verdict"] == "not applicable"
    monkeypatch.setenv("STATELINK_TELEMETRY", '{"log": {}}')
    assert (checked()["verdict"], checked()["found"]) == (
        "ok",
        "from variable STATELINK_TELEMETRY; the engine sets 'role' and 'backend'",
    )
    monkeypatch.setenv("STATELINK_CONFIG", str(tmp_path / "absent.toml"))
    assert checked()["verdict"] == "problem"


def test_a_backend_that_the_environment_names_and_nobody_installed(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An operator sets no role. The backend is a problem with the place of its name, and what to do."""

    def found(name: str) -> dict[str, str]:
        result = CliRunner().invoke(main, ["doctor", "--no-loopback", "--json"])
        assert result.exit_code == 1, result.output
        checks = json.loads(result.stdout)["checks"]
        assert [each["verdict"] for each in checks if each["what"] == "configuration"] == ["ok"]
        (check,) = (each for each in checks if each["about"] == name)
        return dict(check)

    monkeypatch.setenv("STATELINK_BACKEND", "nixl")
    check = found("nixl")
    assert (check["verdict"], check["found"]) == (
        "problem",
        "backend 'nixl' (from STATELINK_BACKEND) is not installed",
    )
    assert "nixl" in check["hint"]
    monkeypatch.delenv("STATELINK_BACKEND")
    path = tmp_path / "link.toml"
    path.write_text('backend = "nixll"\n')
    monkeypatch.setenv("STATELINK_CONFIG", str(path))
    check = found("nixll")
    assert check["found"] == f"backend 'nixll' (from {path}) is not installed"
    assert check["hint"] == "did you mean 'nixl'?"


def test_each_wrong_variable_is_a_problem_and_the_backend_is_checked_all_the_same(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(site, more=NO_CARD)
    wrong = {"ROLE": "server", "THREADS": "many", "DEADLINE": "-1", "PEER": "{}"}
    for name, value in {**wrong, "BACKEND": "good"}.items():
        monkeypatch.setenv(f"STATELINK_{name}", value)
    result = CliRunner().invoke(main, ["doctor", "--no-loopback", "--json"])
    assert result.exit_code == 1
    checks = json.loads(result.stdout)["checks"]
    problems = [each for each in checks if each["what"] == "configuration"]
    assert {each["verdict"] for each in problems} == {"problem"}
    assert len(problems) == len(wrong)
    for name in wrong:
        assert any(f"STATELINK_{name}" in each["found"] for each in problems), name
    assert {each["what"]: each["verdict"] for each in checks if each["about"] == "good"}["probe"] == "problem"


def test_few_open_files_are_a_problem_and_the_hint_of_a_transfer_that_fails(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(site, more="    def __init__(self, context):\n        raise OSError('NIXL_ERR_BACKEND')")
    real = resource.getrlimit
    limits = {"least": 64}

    def limit(which: int) -> tuple[int, int]:
        return (limits["least"],) * 2 if which == resource.RLIMIT_NOFILE else real(which)

    monkeypatch.setattr(resource, "getrlimit", limit)

    def checks() -> dict[str, dict[str, str]]:
        return {
            each["what"]: each
            for each in json.loads(CliRunner().invoke(main, ["doctor", "good", "--json"]).stdout)["checks"]
        }

    found = checks()
    assert found["open files"]["verdict"] == "problem"
    for what in ("open files", "loopback transfer"):
        assert "may have only 64 files open: raise the limit (ulimit -n" in found[what]["hint"]
    limits["least"] = resource.RLIM_INFINITY
    found = checks()
    assert (found["open files"]["verdict"], found["open files"]["found"]) == ("ok", "unlimited")
    assert "ulimit" not in found["loopback transfer"]["hint"]


def test_a_kind_of_memory_that_is_mistyped_has_the_kinds_that_there_are_as_its_hint(site: Site) -> None:
    made(site, more=f"    import dataclasses{FOR_NPUS}")
    hints = {
        option: lines("good", "--memory", "kuda", "-o", f"same_host_copy={option}", expect=1)["loopback transfer"][
            "hint"
        ]
        for option in ("true", "false")
    }
    assert hints == {"true": "--memory npu:0", "false": "--memory dram"}
