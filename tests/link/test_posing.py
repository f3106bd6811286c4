"""A peer whose key is allowed says every kind of message under the name of another one, to both sides.

It speaks before the other one does, and again between its requests. Nothing of what it says counts for the other one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from tests.helpers import peers
from tests.helpers.links import DECODE, PREFILL, STRANGE, Rank, hand_over, keys
from tests.wire.samples import messages

import statelink
from statelink import wire
from statelink.errors import RoomError

EVERYBODY = PREFILL, DECODE, STRANGE
KINDS = sorted(messages())
QUICK = {"heartbeat": 0.2, "liveness": 4.0}


def lie(kind: str, sender: str, to: str) -> list[bytes]:
    """A message of a kind, as if ``sender`` said it."""
    message = messages()[kind]
    return wire.encode(
        msgspec.structs.replace(message, sender=sender, **({"to": to} if hasattr(message, "to") else {}))
    )


@pytest.fixture
def fleet() -> Iterator[tuple[statelink.Link, statelink.Link, Rank, Rank]]:
    """An honest pair, which has not met, and its memory."""
    source, target = Rank("prefill", 1), Rank("decode")
    config = {"backend": "tcp", **QUICK}
    with (
        source.open({"role": "prefill", "keys": keys(PREFILL, *EVERYBODY), **config}) as prefill,
        target.open({"role": "decode", "keys": keys(DECODE, *EVERYBODY), **config}) as decode,
    ):
        yield prefill, decode, source, target


def dropped(link: statelink.Link) -> int:
    return int(link.snapshot()["dropped_frames"].get("wire.sender", 0))


@pytest.mark.parametrize("kind", KINDS)
def test_to_prefill_in_the_name_of_decode(fleet: tuple[statelink.Link, statelink.Link, Rank, Rank], kind: str) -> None:
    prefill, decode, source, target = fleet
    for room in (1, 2):
        before = dropped(prefill)
        with peers.dialled(prefill.address, decode.name, STRANGE) as liar:
            liar.send_multipart(lie(kind, decode.name, prefill.name))
            peers.until(lambda least=before: dropped(prefill) > least)  # type: ignore[misc]
        hand_over(prefill, decode, source, target, room)


@pytest.mark.parametrize("kind", KINDS)
def test_to_decode_in_the_name_of_prefill(fleet: tuple[statelink.Link, statelink.Link, Rank, Rank], kind: str) -> None:
    prefill, decode, source, target = fleet
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    liar = context.socket(zmq.ROUTER)
    liar.linger = 0
    liar.curve_server, liar.curve_secretkey = True, STRANGE["secret"].encode()
    address = peers.keyed(f"tcp://127.0.0.1:{liar.bind_to_random_port('tcp://127.0.0.1')}", STRANGE)
    try:
        asked = decode.receive(99, address, 160, {"kv": range(10)}, deadline=60)
        assert liar.poll(20_000), "decode dials everybody whom it is told to ask, if the key is allowed"
        caller = liar.recv_multipart()[0]
        for room in (1, 2):
            before = dropped(decode)
            liar.send_multipart([caller, *lie(kind, prefill.name, decode.name)])
            peers.until(lambda least=before: dropped(decode) > least)  # type: ignore[misc]
            hand_over(prefill, decode, source, target, room)
        with pytest.raises(RoomError, match=re.escape(wire.Trouble.NAME.what)):
            asked.check()
        asked.abort()
    finally:
        liar.close()
        context.term()
