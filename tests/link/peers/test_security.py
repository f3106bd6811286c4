"""Links with keys: who holds an allowed key is served, and nobody else is heard."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from tests.helpers import peers
from tests.helpers.pair import Pair

from statelink import wire
from statelink.errors import ConfigError

if TYPE_CHECKING:
    from tests.link.conftest import TwoEngines

pytestmark = pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")

_keys = [tuple(part.decode() for part in zmq.curve_keypair()) for _ in range(3)]
OURS, THEIRS, STRANGE = ({"public": public, "secret": secret} for public, secret in _keys)
_rooms = itertools.count(70_000)


def keys(own: dict[str, str], *allowed: dict[str, str]) -> dict[str, Any]:
    return {"keys": {"secret": own["secret"], "allow": tuple(each["public"] for each in allowed)}}


def test_two_that_know_each_other(two_engines: TwoEngines) -> None:
    prefill = two_engines.open("prefill", **keys(OURS, THEIRS))
    decode = two_engines.open("decode", **keys(THEIRS, OURS))
    assert wire.parse_endpoint(prefill.address).key == OURS["public"]
    made = Pair(prefill, decode)
    made.run()
    made.idle()


def test_beyond_loopback_with_keys(two_engines: TwoEngines) -> None:
    """Listening everywhere, and told to peers as what they can reach."""
    prefill = two_engines.open("prefill", listen="tcp://0.0.0.0:0", advertise="127.0.0.1", **keys(OURS, THEIRS))
    Pair(prefill, two_engines.open("decode", **keys(THEIRS, OURS))).run()


@pytest.mark.parametrize("with_key", [True, False])
def test_only_one_side_has_keys(two_engines: TwoEngines, with_key: bool) -> None:
    prefill = two_engines.open("prefill", **(keys(OURS, THEIRS) if with_key else {}))
    decode = two_engines.open("decode", **({} if with_key else keys(THEIRS, OURS)))
    text = decode.receive(next(_rooms), prefill.address, 64, deadline=20).failed(10)
    cause = (
        "its address has a key and this link has none" if with_key else "this link has keys and its address has none"
    )
    assert text == (
        f"cannot dial {prefill.address.partition('@')[0]}: {cause}\n"
        "hint: write the address as tcp://host:port@public-key, and configure keys on both sides"
    )


def test_bare_sockets_are_not_heard(two_engines: TwoEngines) -> None:
    """Without a key, nothing gets as far as being dropped."""
    prefill = two_engines.open("prefill", **keys(OURS, THEIRS))
    with peers.dialled(prefill.address) as socket:
        for _ in range(200):
            with contextlib.suppress(zmq.Again):  # the port has hung up already
                socket.send_multipart([b"hello", b"\xc1"], zmq.NOBLOCK)
        Pair(prefill, two_engines.open("decode", **keys(THEIRS, OURS))).run()
    assert prefill.snapshot()["dropped_frames"] == {}


def test_keys_that_allow_nobody_are_refused(two_engines: TwoEngines) -> None:
    with pytest.raises(ConfigError) as error:
        two_engines.open("decode", **keys(OURS))
    assert error.value.code == "config.keys"
    assert str(error.value).startswith("this link has keys and allows nobody: no peer could connect to it")
    assert "'allow' or 'allow_file' of 'keys'" in error.value.hint


def test_a_key_is_in_no_message(two_engines: TwoEngines) -> None:
    with pytest.raises(ConfigError) as error:
        two_engines.open("prefill", keys={"secret": OURS["secret"], "allow": ("short",)})
    assert OURS["secret"] not in str(error.value)
