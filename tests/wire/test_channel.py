"""The authenticated channel: who may speak, who is dropped, and that nothing bad ends it."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import zmq
from tests.helpers.ports import consecutive_ports

from statelink import wire
from statelink.errors import ConfigError

DEADLINE = 10.0

Open = Callable[..., wire.Channel]


def key_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


@pytest.fixture(name="channel")
def channel_fixture() -> Iterator[Open]:
    with ExitStack() as stack:

        def make(
            name: str,
            listen: str = "tcp://127.0.0.1:0",
            *,
            advertise: str = "",
            keys: wire.Keys | None = None,
            insecure: bool = False,
        ) -> wire.Channel:
            made = wire.Channel(name, listen, advertise=advertise, keys=keys, insecure=insecure)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture(name="stranger")
def stranger_fixture() -> Iterator[zmq.Socket[bytes]]:
    """A socket that knows nothing of Statelink."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        made.linger = 0
        yield made


def receive(channel: wire.Channel, seconds: float = DEADLINE) -> list[tuple[wire.Message, str | None]]:
    """What comes, as soon as something does."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        got = list(channel.receive(0.02))
        if got:
            return got
    return []


def until(happened: Callable[[], bool], *channels: wire.Channel) -> None:
    deadline = time.monotonic() + DEADLINE
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        for channel in channels:
            assert list(channel.receive(0.01)) == []


def ping(sender: str, to: str = "") -> wire.Ping:
    return wire.Ping(sender=sender, to=to)


@pytest.mark.parametrize("listen", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://10.1.2.3:0"])
def test_it_does_not_listen_beyond_loopback_without_keys(listen: str) -> None:
    with pytest.raises(ConfigError) as caught:
        wire.Channel("prefill", listen, advertise="10.1.2.3", keys=None, insecure=False)
    assert caught.value.code == "config.insecure"
    assert str(caught.value) == (
        f"this link would listen on {listen} without keys: anyone who reaches that address could read and change "
        "requests\nhint: configure keys, or set insecure = true on a network that you trust wholly"
    )


def test_ipv6_addresses_keep_their_brackets(channel: Open) -> None:
    if not socket.has_ipv6:
        pytest.skip("this Python has no IPv6")
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")
    prefill, decode = channel("prefill", "tcp://[::1]:0"), channel("decode")
    assert prefill.endpoint.address.startswith("tcp://[::1]:")
    assert wire.parse_endpoint(str(prefill.endpoint)) == prefill.endpoint
    decode.dial(prefill.endpoint)
    decode.send(ping("decode"), str(prefill.endpoint))
    assert receive(prefill) == [(ping("decode"), None)]
    first, second = consecutive_ports(2, "::1")
    where = f"tcp://[::1]:{first}-{second}"
    addresses = [channel(name, where).endpoint.address for name in ("one", "two")]
    assert addresses == [f"tcp://[::1]:{first}", f"tcp://[::1]:{second}"]


def test_an_address_in_use_is_a_configuration_error(channel: Open) -> None:
    first = channel("first")
    port = first.endpoint.address.rpartition(":")[2]
    with pytest.raises(
        ConfigError, match=r"cannot listen on tcp://127\.0\.0\.1:\d+: Address already in use"
    ) as refused:
        channel("second", first.endpoint.address)
    assert refused.value.code == "config.listen"
    assert refused.value.hint == f"`ss -ltnp 'sport = :{port}'` shows who listens there; port 0 picks a free port"


def test_channels_share_a_range_of_ports_until_each_is_taken(channel: Open) -> None:
    ports = consecutive_ports(3)
    where = f"tcp://127.0.0.1:{ports[0]}-{ports[-1]}"
    made = [channel(f"rank-{number}", where) for number in ports]
    assert [each.endpoint.address for each in made] == [f"tcp://127.0.0.1:{port}" for port in ports]
    made[2].dial(made[0].endpoint)
    made[2].send(ping(f"rank-{ports[2]}"), str(made[0].endpoint))
    assert receive(made[0]) == [(ping(f"rank-{ports[2]}"), None)]
    with pytest.raises(ConfigError, match=f"cannot listen on {where}: every port from .* is in use") as refused:
        channel("one too many", where)
    assert refused.value.code == "config.listen"
    assert "give it more of them" in refused.value.hint
    assert f"'sport >= :{ports[0]} and sport <= :{ports[-1]}'" in refused.value.hint
    made[1].close()
    assert channel("next", where).endpoint.address == f"tcp://127.0.0.1:{ports[1]}"


def test_a_range_does_not_hide_why_nobody_can_listen(channel: Open) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on tcp://192\.0\.2\.1:7100-7199: ") as refused:
        wire.Channel("first", "tcp://192.0.2.1:7100-7199", advertise="", keys=None, insecure=True)
    assert refused.value.hint.startswith("192.0.2.1 is no address of this host")


@pytest.mark.parametrize(
    ("host", "hint"),
    [
        ("192.0.2.1", "192.0.2.1 is no address of this host: "),
        ("nowhere.invalid", "nowhere.invalid is neither an address nor a network interface of this host"),
    ],
)
def test_an_address_of_another_host_is_a_configuration_error(host: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on tcp://{host}:0") as refused:
        wire.Channel("first", f"tcp://{host}:0", advertise="", keys=None, insecure=True)
    assert refused.value.code == "config.listen"
    assert refused.value.hint.startswith(hint)


def test_frames_that_are_no_message_are_counted_and_harm_nothing(
    channel: Open, stranger: zmq.Socket[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    prefill = channel("prefill")
    stranger.setsockopt_string(zmq.ROUTING_ID, "stranger#0")
    stranger.connect(prefill.endpoint.address)
    bad = {
        "wire.frames": [[b"hello"], [b"ping", b"\x80", b""], [b""]],
        "wire.kind": [[b"teleport", b"\x80"], [b"", b""], [b"\xff" * 999, b"\x80"]],
        "wire.body": [[b"ping", b""], [b"hello", b"\xc1"], [b"request", os.urandom(99)], [b"ping", b"\x91" * 9999]],
    }
    with caplog.at_level(logging.WARNING, "statelink.wire"):
        for frames in (each for kind in bad.values() for each in kind):
            stranger.send_multipart(frames)
        until(lambda: prefill.dropped.total() == sum(map(len, bad.values())), prefill)
    assert prefill.dropped == {code: len(each) for code, each in bad.items()}
    # The first, second, fourth of a kind and so on: a flood does not fill the log.
    assert len(caplog.records) == 2 + 2 + 3
    assert all(len(record.getMessage()) < 600 for record in caplog.records)
    stranger.send_multipart(wire.encode(ping("stranger")))
    assert receive(prefill) == [(ping("stranger"), None)]


def test_answers_go_to_the_connection_over_which_a_peer_spoke_last(channel: Open) -> None:
    prefill, decode = channel("prefill"), channel("decode")
    address = str(prefill.endpoint)
    for _ in range(3):
        decode.dial(prefill.endpoint)
        decode.send(ping("decode"), address)
        assert receive(prefill) == [(ping("decode"), None)]
        prefill.send(wire.Pong(sender="prefill", to="decode"), None)
        assert receive(decode) == [(wire.Pong(sender="prefill", to="decode"), address)]
        # Dialled anew at once, while the old connection may still be known to the other side.
        decode.hang_up(address)
    assert not prefill.dropped


@pytest.mark.parametrize("address", [None, "tcp://127.0.0.1:1"])
def test_a_message_to_nobody_is_not_sent_and_the_log_names_whom_it_was_for(
    channel: Open, address: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "statelink.wire")
    assert not channel("prefill").send(ping("prefill", "decode.3-ff"), address)
    assert "could not be sent to decode.3-ff" in caplog.text


def test_a_message_that_is_too_large_is_not_sent_and_is_an_error_in_the_log(
    channel: Open, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = channel("prefill"), channel("decode")
    decode.dial(prefill.endpoint)
    assert not decode.send(wire.Bye(sender="x" * wire.limit_of(wire.Bye)), str(prefill.endpoint))
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "wire.size" in caplog.text


def test_hanging_up_closes_one_connection(channel: Open) -> None:
    prefill, decode = channel("prefill"), channel("decode")
    address = str(prefill.endpoint)
    decode.dial(prefill.endpoint)
    decode.hang_up(address)
    decode.hang_up(address)
    assert not decode.send(ping("decode"), address)
    decode.dial(prefill.endpoint)
    decode.send(ping("decode"), address)
    assert receive(prefill) == [(ping("decode"), None)]


@pytest.mark.parametrize(
    "endpoint",
    [wire.Endpoint("tcp://no such host:1"), wire.Endpoint("nonsense"), wire.Endpoint("tcp://127.0.0.1:1", "a" * 40)],
)
def test_what_cannot_be_dialled_is_one_kind_of_error(channel: Open, endpoint: wire.Endpoint) -> None:
    public, secret = key_pair()
    made = channel("decode", keys=wire.Keys(secret=secret, allow=(public,)) if endpoint.key else None)
    with pytest.raises(ConfigError):
        made.dial(endpoint)
    assert not made.send(ping("decode"), str(endpoint))


def test_a_watched_descriptor_ends_the_wait(channel: Open) -> None:
    made = channel("prefill")
    read, write = os.pipe()
    try:
        made.start(read)
        os.write(write, b"x")
        assert list(made.receive(3600)) == []
    finally:
        made.close()
        os.close(read)
        os.close(write)


def test_closing_twice_is_harmless(channel: Open) -> None:
    made, peer = channel("prefill"), channel("decode")
    made.dial(peer.endpoint)
    made.close()
    made.close()
    # The port is free again.
    channel("next", made.endpoint.address)
