"""``statelink doctor`` and the configuration: what `statelink.open` refuses is a problem, and nothing else is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zmq
from click.testing import CliRunner
from tests.helpers.system import System

import statelink
from statelink import state
from statelink.cli import main
from statelink.errors import StatelinkError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.registry.sites import Site

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"telemetry": {"promethius": {}}}, "config.telemetry", "did you mean 'prometheus'?"),
    ({"options": {"hosst": 1}}, "config.key", "did you mean 'host'?"),
    ({"listen": "tcp://0.0.0.0:0"}, "config.insecure", "configure keys, or "),
    ({"listen": "tcp://0.0.0.0:0", "insecure": True}, "config.advertise", "set 'advertise'"),
    ({"advertise": "a..b"}, "config.advertise", "write a host name"),
    ({"listen": "tcp://a..b:0", "insecure": True}, "config.listen", "write an IP address"),
    ({"listen": "tcp://127.0.0.1:7199-7100"}, "config.listen", "tcp://host:port, or a range of ports"),
    ({"rendezvous": "foo"}, "config", "tcp://host:port"),
    ({"rendezvous": "etdc://a:1"}, "rendezvous.unknown", "did you mean 'etcd'?"),
    ({"rendezvous_options": {"lifetime": 3}}, "config", "set 'rendezvous'"),
    ({"rendezvous": "tcp://127.0.0.1:1", "rendezvous_options": {"lifetime": 3}}, "config.key", ""),
    ({"rendezvous": "etcd://nowhere"}, "config.etcd", "write etcd://host:2379"),
    ({"peers": {"p": ["10.0.0.1:5"]}}, "config", "tcp://host:port"),
    ({"siblings": ["10.0.0.1:5"]}, "config", "tcp://host:port"),
    ({"require": ["rdma"]}, "backend.transport", "see 'statelink doctor'"),
]
"""Keys with which no link opens, the code of the error, and how the hint begins."""


def over_tcp(*arguments: str) -> dict[str, dict[str, Any]]:
    """What is said of `tcp`, of which nothing is a problem."""
    checks = json.loads(CliRunner().invoke(main, ["doctor", "tcp", *arguments, "--json"]).stdout)["checks"]
    found = {each["what"]: each for each in checks if each["about"] == "tcp"}
    assert not [each for each in found.values() if each["verdict"] == "problem"]
    return found


def with_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str, keys: dict[str, Any]
) -> tuple[int, list[dict[str, str]]]:
    """The exit status, and the problems that doctor finds over `tcp`."""
    monkeypatch.delenv("STATELINK_CONFIG", raising=False)
    if where == "file":
        path = tmp_path / "link.json"
        path.write_text(json.dumps({"backend": "tcp", **keys}))
        path.chmod(0o600)
        monkeypatch.setenv("STATELINK_CONFIG", str(path))
    else:
        monkeypatch.setenv("STATELINK_BACKEND", "tcp")
        for key, value in keys.items():
            text = value if isinstance(value, str) else json.dumps(value)
            monkeypatch.setenv(f"STATELINK_{key.upper()}", text)
    (tmp_path / "dev/shm").mkdir(parents=True, exist_ok=True)
    with System(tmp_path):  # what else this machine lacks is not the point
        result = CliRunner().invoke(main, ["doctor", "tcp", "--no-loopback", "--json"])
    checks = json.loads(result.stdout)["checks"]
    return result.exit_code, [each for each in checks if each["verdict"] == "problem"]


@pytest.mark.parametrize("where", ["environment", "file"])
@pytest.mark.parametrize(("keys", "code", "hint"), REFUSED)
def test_what_open_refuses_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str, keys: dict[str, Any], code: str, hint: str
) -> None:
    """`statelink.open` and `doctor` agree, and the problem says where the key stands."""
    status, problems = with_configuration(monkeypatch, tmp_path, where, keys)
    assert (status, len(problems)) == (1, 1), problems
    assert problems[0]["code"] == code
    assert problems[0]["hint"].startswith(hint)
    if code != "backend.transport":
        place = "(file " if where == "file" else f"(variable STATELINK_{next(iter(keys)).upper()}"
        assert place in problems[0]["found"]
    keys_and_values = np.zeros((2, 4, 2, 8), np.uint8), np.zeros((2, 4, 2, 8), np.uint8)
    inventory = state.describe("p", [state.kv_pages({0: keys_and_values}, heads=2)])
    monkeypatch.setenv("STATELINK_ROLE", "prefill")
    with pytest.raises(StatelinkError) as refused:
        statelink.open(None, inventory)
    assert refused.value.code == code


def test_keys_that_cannot_be_used_are_one_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = {"listen": "tcp://0.0.0.0:0", "advertise": "10.0.0.1", "rendezvous": "tcp://10.0.0.2:7400"}
    monkeypatch.setenv("STATELINK_SECRET_FILE", str(tmp_path / "absent"))
    status, problems = with_configuration(monkeypatch, tmp_path, "environment", keys)
    assert (status, len(problems)) == (1, 1), problems
    assert problems[0]["code"] == "config.keys"
    assert problems[0]["what"] == "configuration"
    for name in ("SECRET_FILE", *(key.upper() for key in keys), "BACKEND"):
        monkeypatch.delenv(f"STATELINK_{name}")
    inside = {**keys, "keys": {"secret_file": str(tmp_path / "absent")}}
    status, problems = with_configuration(monkeypatch, tmp_path, "file", inside)
    assert (status, len(problems)) == (1, 1), problems
    assert problems[0]["code"] == "config.keys"


@pytest.mark.parametrize("text", ["threads = ", 'backend = "tcp"\nthreads = "many"\n'])
def test_a_wrong_file_hides_no_problem_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    """Nor does it make one of a variable that is right beside it."""
    path = tmp_path / "link.toml"
    path.write_text(text)
    wrong = {"THREADZ": "3", "DEADLINE": "-1", "TELEMETRY": '{"promethius": {}}'}
    right = {
        "LISTEN": "tcp://0.0.0.0:0",
        "RENDEZVOUS_OPTIONS": '{"lifetime": 20}',
        "LIVENESS": "0.5",
        "CONFIG": str(path),
    }
    for name, value in {**wrong, **right}.items():
        monkeypatch.setenv(f"STATELINK_{name}", value)
    result = CliRunner().invoke(main, ["doctor", "tcp", "--no-loopback", "--json"])
    checks = json.loads(result.stdout)["checks"]
    problems = [each["found"] for each in checks if each["what"] == "configuration"]
    assert len(problems) == len(wrong) + 1, problems
    for said in (*(f"STATELINK_{name}" for name in wrong), str(path)):
        assert any(said in each for each in problems), said


def test_the_transfer_has_the_options_and_the_transports_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STATELINK_OPTIONS", '{"tcp": {"same_host_copy": false}}')
    monkeypatch.setenv("STATELINK_REQUIRE", "socket")
    found = over_tcp()
    assert found["require"]["found"] == "it may use socket"
    assert "transport: socket" in found["loopback transfer"]["found"]
    monkeypatch.setenv("STATELINK_BACKEND", "tcp")
    monkeypatch.setenv("STATELINK_OPTIONS", '{"same_host_copy": false}')
    assert "transport: socket" in over_tcp()["loopback transfer"]["found"]
    # Another transport between two processes of one host says nothing of two hosts.
    copied = over_tcp("-o", "same_host_copy=true")["loopback transfer"]
    assert copied["verdict"] == "not applicable"
    assert copied["found"].startswith("on one host: ")


def test_keys_of_the_environment_do_not_disturb_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need not allow each other on one host."""
    monkeypatch.setenv("STATELINK_SECRET", zmq.curve_keypair()[1].decode())
    assert over_tcp()["loopback transfer"]["verdict"] == "ok"


@pytest.mark.parametrize(
    ("require", "verdict", "takes"), [("", "ok", "good, tcp"), ("socket", "ok", "tcp"), ("pigeons", "problem", "")]
)
def test_auto_has_to_find_a_backend(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, require: str, verdict: str, takes: str
) -> None:
    site.backend("good")  # it does not tell its transport
    monkeypatch.setenv("STATELINK_BACKEND", "auto")
    monkeypatch.setenv("STATELINK_REQUIRE", require)
    (tmp_path / "dev/shm").mkdir(parents=True)
    with System(tmp_path):
        result = CliRunner().invoke(main, ["doctor", "--no-loopback", "--json"])
    (check,) = (each for each in json.loads(result.stdout)["checks"] if each["about"] == "auto")
    assert (check["verdict"], result.exit_code) == (verdict, int(verdict == "problem"))
    assert not takes or check["found"] == f"it may take {takes}"


@pytest.mark.parametrize("count", [None, 0, 3])
@pytest.mark.parametrize("configured", [False, True])
def test_keys_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int | None, configured: bool) -> None:
    """Also where the environment has keys alone, since an engine has the rest. Nobody allowed is one problem."""
    monkeypatch.delenv("STATELINK_CONFIG", raising=False)
    if configured:
        monkeypatch.setenv("STATELINK_BACKEND", "tcp")
    if count is not None:
        monkeypatch.setenv("STATELINK_SECRET", zmq.curve_keypair()[1].decode())
        monkeypatch.setenv("STATELINK_ALLOW", " ".join(zmq.curve_keypair()[0].decode() for _ in range(count)))
    (tmp_path / "dev/shm").mkdir(parents=True)
    with System(tmp_path):
        result = CliRunner().invoke(main, ["doctor", "tcp", "--no-loopback", "--json"])
    checks = json.loads(result.stdout)["checks"]
    problems = [(each["what"], each["code"]) for each in checks if each["verdict"] == "problem"]
    assert problems == ([("configuration" if configured else "keys", "config.keys")] if count == 0 else [])
    assert result.exit_code == int(count == 0)
    found = [each["found"] for each in checks if each["what"] == "keys" and each["verdict"] != "problem"]
    assert found == {None: ["none in the environment"], 0: [], 3: ["yes, 3 allowed"]}[count]


def test_keys_that_nobody_else_looks_at_are_a_problem_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STATELINK_SECRET_FILE", str(tmp_path / "absent"))
    checks = json.loads(CliRunner().invoke(main, ["doctor", "tcp", "--no-loopback", "--json"]).stdout)["checks"]
    (keys,) = (each for each in checks if each["what"] == "keys")
    assert (keys["verdict"], keys["code"]) == ("problem", "config.keys")


def test_a_backend_that_is_not_there_has_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(main, ["doctor", "tpc", "--no-loopback", "--json"])
    (check,) = (each for each in json.loads(result.stdout)["checks"] if each["about"] == "tpc")
    assert (check["verdict"], check["code"]) == ("problem", "backend.unknown")
    assert "[backend.unknown]" in CliRunner().invoke(main, ["doctor", "tpc", "--no-loopback"]).output
