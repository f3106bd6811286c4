"""A link's configuration from a dict, a file and the environment: what wins, and what is said of what is wrong."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from statelink.config import LinkConfig, Staging, read_config
from statelink.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_configuration")

TOML = """
role = "decode"
backend = "tcp"
siblings = ["tcp://10.0.0.1:1"]
threads = 3

[options]
streams = 7
"""


@pytest.fixture(name="toml")
def toml_fixture(tmp_path: Path) -> Path:
    path = tmp_path / "link.toml"
    path.write_text(TOML)
    return path


def test_a_dict_is_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATELINK_THREADS", "9")
    monkeypatch.setenv("STATELINK_CONFIG", "/nowhere.toml")
    given = read_config({"role": "decode", "backend": "tcp"})
    assert (given.config.threads, given.origin("threads")) == (2, {})


def test_toml_and_json_say_the_same(toml: Path, tmp_path: Path) -> None:
    values = {"role": "decode", "backend": "tcp", "siblings": ["tcp://10.0.0.1:1"], "threads": 3}
    path = tmp_path / "link.json"
    path.write_text(json.dumps({**values, "options": {"streams": 7}}))
    expected = LinkConfig(
        role="decode", backend="tcp", siblings=("tcp://10.0.0.1:1",), threads=3, options={"streams": 7}
    )
    assert read_config(toml).config == expected
    assert read_config(str(path)).config == expected


def test_each_variable_wins_over_its_key_of_the_file(toml: Path) -> None:
    environment = {
        "STATELINK_LISTEN": "tcp://127.0.0.1:7100",
        "STATELINK_THREADS": "5",
        "STATELINK_SIBLINGS": "tcp://10.0.0.2:1, tcp://10.0.0.3:1",
        "STATELINK_PEERS": '{"prefill-0": ["tcp://10.0.0.4:1"]}',
        "STATELINK_OPTIONS": '{"port": 5}',
        "STATELINK_INSPECT": "false",
        "STATELINK_TAKE_BACK_AFTER": "2.5",
        "STATELINK_REQUIRE": "rdma",
        "STATELINK_ADVERTISE": "",
    }
    given = read_config(toml, environment)
    assert given.config == LinkConfig(
        role="decode",
        backend="tcp",
        listen="tcp://127.0.0.1:7100",
        threads=5,
        siblings=("tcp://10.0.0.2:1", "tcp://10.0.0.3:1"),
        peers={"prefill-0": ("tcp://10.0.0.4:1",)},
        options={"port": 5},
        inspect=False,
        take_back_after=2.5,
        require=("rdma",),
    )
    assert given.origin("backend") == {"file": str(toml)}
    assert given.origin("options") == {"variable": "STATELINK_OPTIONS"}


def test_the_environment_alone_is_enough_and_may_name_the_file(toml: Path) -> None:
    alone = read_config(None, {"STATELINK_ROLE": "prefill", "STATELINK_BACKEND": "auto"})
    assert (alone.config.role, alone.config.backend) == ("prefill", "auto")
    both = read_config(None, {"STATELINK_CONFIG": str(toml), "STATELINK_ROLE": "prefill"})
    assert (both.config.role, both.config.threads) == ("prefill", 3)


def test_a_named_file_wins_over_the_one_in_the_environment(toml: Path) -> None:
    assert read_config(toml, {"STATELINK_CONFIG": "/nowhere.toml"}).config.threads == 3


def test_every_key_but_secrets_has_a_variable_that_reaches_it() -> None:
    samples: dict[str, Any] = {
        "role": "prefill",
        "backend": "b",
        "verify": "digest",
        "heartbeat": 1.5,
        "staging": msgspec.to_builtins(Staging()),
        "telemetry": {"log": {}},
        "switch_interval": 0.002,
    }
    for key in LinkConfig.__struct_fields__:
        default = getattr(LinkConfig(role="decode", backend="tcp"), key)
        if key == "keys":
            continue
        value = samples.get(key)
        if value is None:
            value = {bool: not default, int: 99, float: 99.5, str: "text", dict: {"a": ["b"]}}.get(
                type(default), ("a", "b") if isinstance(default, tuple) else 7.5
            )
        text = value if isinstance(value, str) else json.dumps(value)
        base = {"STATELINK_ROLE": "decode", "STATELINK_BACKEND": "tcp"}
        base[f"STATELINK_{key.upper()}"] = text
        found = getattr(read_config(None, base).config, key)
        assert found != default, key
        assert json.loads(msgspec.json.encode(found)) == json.loads(json.dumps(value)), key


def refusal(given: Any, environment: dict[str, str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        read_config(given, environment or {})
    return refused.value


def test_an_unknown_key_of_a_file_is_named_with_the_file(toml: Path) -> None:
    toml.write_text(TOML.replace("threads", "thread"))
    error = refusal(toml)
    assert (error.code, error.reason.who) == ("config.key", {"file": str(toml)})
    assert "unknown key 'thread'" in str(error)
    assert error.hint == "did you mean 'threads'?"


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ('threads = "3"', "config.type", "threads: a whole number is expected, got '3'"),
        ("deadline = true", "config.type", "deadline: a number is expected, got True"),
        ('staging = { ring_bytes = "1" }', "config.type", "staging.ring_bytes: a whole number is expected, got '1'"),
        ('take_back_after = "3"', "config.type", "take_back_after: a number is expected, got '3'"),
        ("keys = { secret = [1] }", "config.type", "keys.secret: text is expected, got a list"),
        ("threads = 0", "config", "threads must be above zero"),
        ("liveness = 0.5", "config", "liveness must be at least twice the heartbeat"),
        ('keys = { secret = "short" }', "config.keys", "is not a CURVE key"),
        ('require = "unknown"', "config", "require names transports"),
        ('verify = "pull"', "config.type", "hint: 'verify' is one of 'off', 'digest'"),
        ("staging = { ring_byte = 3 }", "config.key", "hint: did you mean 'ring_bytes'?"),
        ('keys = { secrt_file = "x" }', "config.key", "unknown key 'secrt_file' in the table 'keys'"),
    ],
)
def test_a_wrong_value_of_a_file_is_named_with_the_file(toml: Path, line: str, code: str, said: str) -> None:
    toml.write_text(f"{line}\n{TOML.replace('threads = 3', '')}")
    toml.chmod(0o600)
    error = refusal(toml, {"STATELINK_LISTEN": "tcp://127.0.0.1:1"})
    assert (error.code, error.reason.who) == (code, {"file": str(toml)})
    assert said in str(error)


def test_a_wrong_variable_is_named(toml: Path) -> None:
    error = refusal(toml, {"STATELINK_THREADS": "many"})
    assert (error.code, error.reason.who) == ("config.type", {"variable": "STATELINK_THREADS"})
    error = refusal(toml, {"STATELINK_THREADS": '"3"'})
    assert (error.code, error.reason.who) == ("config.type", {"variable": "STATELINK_THREADS"})
    error = refusal(toml, {"STATELINK_INSECURE": "yes"})
    assert (error.code, error.hint) == ("config.type", "write true or false")
    error = refusal(toml, {"STATELINK_PEER": "{}"})
    assert (error.code, error.hint) == ("config.key", "did you mean STATELINK_PEERS?")


def test_keys_have_variables_of_their_own(toml: Path) -> None:
    error = refusal(toml, {"STATELINK_KEYS": '{"secret_file": "/run/secret"}'})
    assert (error.code, error.reason.who) == ("config.key", {"variable": "STATELINK_KEYS"})
    assert "STATELINK_SECRET_FILE and STATELINK_ALLOW_FILE" in error.hint
    assert "/run/secret" not in str(error)
    assert read_config(toml, {"STATELINK_KEYS": ""}) == read_config(toml, {})


def test_variables_that_a_platform_makes_up_are_left_alone(toml: Path) -> None:
    names = ("SERVICE_HOST", "SERVICE_PORT", "PORT", "PORT_7400_TCP", "PORT_7400_TCP_ADDR", "PORT_7400_TCP_PROTO")
    assert read_config(toml, {f"STATELINK_{name}": "x" for name in names}) == read_config(toml, {})


def test_a_missing_key_and_no_configuration_at_all(toml: Path) -> None:
    toml.write_text('role = "decode"')
    error = refusal(toml)
    assert error.reason.who == {"file": str(toml)}
    assert "backend is missing" in str(error)
    assert error.hint == 'set STATELINK_BACKEND, or backend = "auto" in the file'
    assert refusal(None).code == "config.file"
    assert refusal(None, {"STATELINK_BACKEND": "tcp"}).reason.who == {}
    assert refusal(5).code == "config.type"


def test_a_key_that_a_mapping_lacks_and_the_environment_has() -> None:
    error = refusal({"role": "decode"}, {"STATELINK_BACKEND": "tcp"})
    assert "backend is missing" in str(error)
    assert error.reason.hint == "STATELINK_BACKEND is not read beside a mapping; pass None"
    assert "STATELINK" not in str(refusal({"role": "decode"}, {"STATELINK_ROLE": "decode"}))


def test_values_that_a_reader_assumes_give_way_and_are_no_configuration(toml: Path) -> None:
    assumed = {"role": "prefill", "backend": "auto", "threads": 7}
    given = read_config(toml, {}, assumed=assumed)
    assert (given.config.role, given.config.backend, given.config.threads) == ("decode", "tcp", 3)
    alone = read_config(None, {"STATELINK_BACKEND": "tcp"}, assumed=assumed)
    assert (alone.config.role, alone.config.backend, alone.config.threads) == ("prefill", "tcp", 7)
    assert set(alone.origins) == {"backend"}
    with pytest.raises(ConfigError, match="no configuration is given"):
        read_config(None, {}, assumed=assumed)
    with pytest.raises(ConfigError) as refused:
        read_config(None, {"STATELINK_DEADLINE": "0"}, assumed=assumed)
    assert refused.value.reason.who == {"variable": "STATELINK_DEADLINE"}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("link.yaml", "role: decode", "*.toml or *.json"),
        ("link.toml", "role = decode", "Invalid value"),
        ("link.json", "{", "Expecting property name"),
        ("link.json", "[1]", "it holds list"),
        ("absent.toml", None, "No such file"),
        ("empty.toml", "", "it holds no key"),
        ("link", "role = 1", "its name has no ending"),
        ("link.toml", b"\xff\xfe", "utf-8"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, text: str | bytes | None, said: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    error = refusal(path)
    assert (error.code, error.reason.who) == ("config.file", {"file": str(path)})
    assert said in str(error)


def test_a_file_with_a_secret_in_it_is_private(toml: Path) -> None:
    _, secret = (part.decode() for part in zmq.curve_keypair())
    toml.write_text(f"keys = {{ secret = '{secret}' }}\n{TOML}")
    toml.chmod(0o644)
    error = refusal(toml)
    assert (error.code, error.hint) == ("config.keys", f"chmod 600 {toml}")
    assert secret not in str(error)
    os.chmod(toml, 0o600)
    keys = read_config(toml, {}).config.keys
    assert keys is not None
    assert keys.secret == secret


def test_a_role_that_is_missing_or_wrong_has_a_hint_with_all_of_them() -> None:
    for given in ({"backend": "tcp"}, {"backend": "tcp", "role": "sender"}):
        with pytest.raises(ConfigError) as error:
            LinkConfig.read(given)
        assert error.value.hint == "'role' is one of 'prefill', 'decode', 'both'"
