"""``listen`` and ``advertise``: where a link and its backend listen, and what peers are told."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.links import Rank, hand_over

from statelink.errors import ConfigError
from statelink.tcp import TcpBackend

if TYPE_CHECKING:
    from statelink.backend import BackendContext

pytestmark = pytest.mark.usefixtures("no_configuration")

TCP: dict[str, Any] = {"backend": "tcp", "insecure": True, "options": {"same_host_copy": False}}
EVERYWHERE: dict[str, Any] = {**TCP, "listen": "tcp://0.0.0.0:0"}


def _others() -> list[str]:
    """This host's interfaces beside loopback."""
    return [name for _, name in socket.if_nameindex() if name != "lo"]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, bytes]]:
    """For each backend: the host that peers are told, where it listens, and its descriptor."""
    found = []
    construct = TcpBackend.__init__

    def __init__(self: TcpBackend, context: BackendContext) -> None:
        construct(self, context)
        found.append((context.host, context.listen, self.descriptor()))

    monkeypatch.setattr(TcpBackend, "__init__", __init__)
    return found


@pytest.mark.parametrize(
    "where",
    [
        {"listen": "tcp://localhost:0"},
        {"listen": "tcp://lo:0"},
        {"listen": "tcp://0.0.0.0:0", "advertise": "localhost"},
        {"listen": "tcp://*:0", "advertise": "127.0.0.1"},
        {"listen": "tcp://localhost:0", "advertise": "localhost"},
    ],
)
def test_names_and_interfaces_carry_a_request(where: dict[str, str]) -> None:
    source, target = Rank("p", fill=1), Rank("d")
    with (
        source.open({**TCP, **where}, role="prefill") as prefill,
        target.open({**TCP, **where}, role="decode") as decode,
    ):
        hand_over(prefill, decode, source, target)


def test_the_loopback_interface_needs_no_keys() -> None:
    with Rank("p").open({"backend": "tcp"}, role="prefill", listen="tcp://lo:0") as link:
        assert link.address.rpartition(":")[0] in ("tcp://127.0.0.1", "tcp://[::1]")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.9.9.9", "example.invalid", "LO", "lo1", *_others()])
def test_what_is_not_loopback_needs_keys(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Rank("p").open({"backend": "tcp"}, role="prefill", listen=f"tcp://{host}:0", advertise="127.0.0.1")
    assert caught.value.code == "config.insecure"


def test_peers_are_told_an_address_that_is_not_of_this_host(told: list[tuple[str, str, bytes]]) -> None:
    with Rank("p").open(EVERYWHERE, role="prefill", advertise="10.9.9.9") as link:
        assert link.address.startswith("tcp://10.9.9.9:")
    ((host, listen, descriptor),) = told
    assert (host, listen) == ("10.9.9.9", "0.0.0.0")
    assert b"10.9.9.9" in descriptor


def test_the_backend_listens_where_the_link_does(told: list[tuple[str, str, bytes]]) -> None:
    with Rank("p").open(TCP, role="prefill", listen="tcp://127.0.0.1:0", advertise="10.9.9.9"):
        pass
    with Rank("p").open(TCP, role="prefill"):
        pass
    assert [each[:2] for each in told] == [("10.9.9.9", "127.0.0.1"), ("127.0.0.1", "127.0.0.1")]


def test_a_name_is_told_as_its_address_of_the_family_that_is_listened_at(
    monkeypatch: pytest.MonkeyPatch, told: list[tuple[str, str, bytes]]
) -> None:
    families = [(socket.AF_INET6, ("fd00::7", 0, 0, 0)), (socket.AF_INET, ("10.0.0.7", 0))]
    found = [(family, socket.SOCK_STREAM, 6, "", address) for family, address in families]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with Rank("p").open(EVERYWHERE, role="prefill", advertise="worker-7") as link:
        assert link.address.startswith("tcp://worker-7:")
    assert told[0][:2] == ("10.0.0.7", "0.0.0.0")


def test_a_name_that_only_this_host_reaches_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with Rank("p").open(EVERYWHERE, role="prefill", advertise="worker-7"):
        pass
    assert "worker-7 is 127.0.1.1 on this host" in caplog.text


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"advertise": "worker-7"}, "config.advertise"),
        ({"advertise": "0.0.0.0"}, "config.advertise"),
        ({"advertise": "10.0.0.1:7100"}, "config.advertise"),
        ({"listen": "tcp://worker-7:0"}, "config.listen"),
    ],
)
def test_a_host_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, str], code: str
) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError) as refused:
        Rank("p").open(EVERYWHERE, role="prefill", **keys)
    assert refused.value.code == code
    assert refused.value.hint
