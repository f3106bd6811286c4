"""Addresses and keys as text, and what is refused without them."""

from __future__ import annotations

import base64
import random
import shlex
import urllib.parse

import msgspec
import pytest
import zmq.utils.z85
from tests.helpers.links import key_pair

from statelink import wire
from statelink.errors import ConfigError

PUBLIC, SECRET = key_pair(0)
URL = base64.urlsafe_b64encode(zmq.utils.z85.decode(PUBLIC.encode())).decode().rstrip("=")


@pytest.mark.parametrize(
    ("text", "address", "key"),
    [
        ("tcp://127.0.0.1:5000", "tcp://127.0.0.1:5000", ""),
        ("tcp://node-7.fleet:0", "tcp://node-7.fleet:0", ""),
        ("tcp://[fe80::1]:65535", "tcp://[fe80::1]:65535", ""),
        (f"tcp://10.0.0.1:1@{URL}", "tcp://10.0.0.1:1", PUBLIC),
    ],
)
def test_addresses_are_read(text: str, address: str, key: str) -> None:
    endpoint = wire.parse_endpoint(text)
    assert endpoint == (address, key)
    assert str(endpoint) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:5000",
        "tcp://",
        "tcp://host",
        "tcp://host:",
        "tcp://:5000",
        "tcp://host:65536",
        "tcp://host:-1",
        "tcp://host:5x",
        "udp://host:5000",
        "ipc:///tmp/socket",
        "TCP://host:5000",
        f"tcp://host:{'9' * 5000}",
        "tcp://host:٣",
        "tcp://127.0.0.1:0;10.0.0.9:5000",
        "tcp://127.0.0.1/.example:5000",
        "tcp://127.0.0.1#.example:5000",
        "tcp://127.0.0.1?.example:5000",
        "tcp://127.0.0.1\0.example:5000",
        "tcp://ho st:5000",
        "tcp://h\u00f6st:5000",
        "tcp://host\ud800:5000",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        wire.parse_endpoint(text)
    assert str(caught.value) == (f"{text!r} is not an address\nhint: tcp://host:port, or tcp://host:port@public-key")


@pytest.mark.parametrize(
    ("text", "host", "first", "last"),
    [
        ("tcp://127.0.0.1:0", "127.0.0.1", 0, 0),
        ("tcp://node-7.fleet:7100-7199", "node-7.fleet", 7100, 7199),
        ("tcp://[fe80::1]:7100-65535", "fe80::1", 7100, 65535),
        ("tcp://*:1-1", "*", 1, 1),
    ],
)
def test_where_to_listen_is_read(text: str, host: str, first: int, last: int) -> None:
    where = wire.parse_listen(text)
    assert where == (host, (first, last))
    assert str(where) == text.replace("1-1", "1")


PORT = "a port is between 0 and 65535, and a range is written as 7100-7199"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("tcp://host:7199-7100", "the range of ports begins at 7199, which is above its end, 7100"),
        ("tcp://host:0-7100", "port 0 lets the system choose a port, and so it begins no range"),
        ("tcp://host:7100-65536", PORT),
        ("tcp://host:65536", PORT),
        ("tcp://host:7100-", PORT),
        ("tcp://host:-7100", PORT),
        ("tcp://host:7100-7110-7120", PORT),
        ("tcp://host:7100--7110", PORT),
        ("tcp://host:", ""),
        ("tcp://host:7100..7110", ""),
        ("tcp://host:7100-7110@key", ""),
        (f"tcp://host:7100@{URL}", ""),
        ("tcp://127.0.0.1:0;10.0.0.9:5000", ""),
        ("host:7100-7110", ""),
    ],
)
def test_where_nobody_can_listen_is_refused(text: str, cause: str) -> None:
    with pytest.raises(ConfigError) as caught:
        wire.parse_listen(text)
    assert (caught.value.code, caught.value.reason.cause) == ("config.listen", cause)
    assert caught.value.hint == "tcp://host:port, or a range of ports: tcp://host:7100-7199"


def test_an_address_to_dial_has_one_port() -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        wire.parse_endpoint("tcp://host:7100-7199")


@pytest.mark.parametrize(
    "key",
    ["", "short", "x" * 42, "x" * 44, "x" * 43, f"{URL}=", f"{URL}@{URL}", "é" * 43, " " * 43, "A" * 42 + "B", PUBLIC],
)
def test_what_is_no_key_is_refused_in_an_address(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        wire.parse_endpoint(f"tcp://host:1@{key}")
    assert caught.value.code == "config.keys"
    assert str(caught.value) == (
        "the key in address 'tcp://host:1' is not a CURVE key: 43 characters of base64url are expected\n"
        "hint: statelink keys show FILE --address"
    )


def test_an_address_with_any_key_needs_no_quotes() -> None:
    rng = random.Random(0)
    for number in range(2000):
        raw = bytes([255 if number % 2 else 0]) * 32 if number < 2 else rng.randbytes(32)
        endpoint = wire.Endpoint("tcp://10.0.0.1:7400", zmq.utils.z85.encode(raw).decode())
        text = str(endpoint)
        assert shlex.quote(text) == text
        assert urllib.parse.quote(text, safe=":/@") == text
        assert len(text) == len("tcp://10.0.0.1:7400@") + 43
        assert wire.parse_endpoint(text) == endpoint


@pytest.mark.parametrize("key", [" ", "short", "x" * 41, '"' * 40, "é" * 40])
def test_what_is_no_key_is_refused_in_keys(key: str) -> None:
    for made, what in (({"secret": key}, "secret"), ({"secret": SECRET, "allow": (PUBLIC, key)}, "allow")):
        with pytest.raises(ConfigError) as caught:
            wire.Keys(**made)
        assert caught.value.code == "config.keys"
        assert str(caught.value).startswith(f"keys.{what} is not a CURVE key")


def test_the_public_key_follows_from_the_secret_one_which_is_never_shown() -> None:
    keys = wire.Keys(secret=SECRET, allow=(PUBLIC,))
    assert keys.public == PUBLIC
    assert repr(keys) == f"Keys(public={PUBLIC!r}, secret=..., 1 allowed)"
    assert SECRET not in f"{keys}{keys!r}{[keys]}"


def test_unknown_fields_of_keys_are_errors() -> None:
    with pytest.raises(msgspec.ValidationError, match="alow"):
        msgspec.convert({"secret": SECRET, "alow": []}, wire.Keys)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.9.9.9:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://*:1", False),
        ("tcp://[::]:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://128.0.0.1:1", False),
        ("tcp://127.0.0.1.example.org:1", False),
        ("tcp://localhost.example.org:1", False),
        ("tcp://eth0:1", False),
    ],
)
def test_only_addresses_of_this_machine_alone_are_loopback(address: str, loopback: bool) -> None:
    assert wire.is_loopback(address) is loopback
