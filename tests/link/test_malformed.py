"""Introductions that no link would make, by the hundred; and frames that are almost right, for other tests."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq
from tests.helpers import peers

from statelink import Status, wire

if TYPE_CHECKING:
    from tests.helpers.engine import LinkHandle
    from tests.helpers.pair import Pair

pytestmark = pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")


def dropped(link: LinkHandle) -> int:
    return sum(link.snapshot()["dropped_frames"].values())


def examples(link: LinkHandle, name: str) -> list[list[bytes]]:
    """One well-formed message of each kind from ``name``, of which most are about things that are not there."""
    use: dict[str, Any] = {"sender": name, "to": link.name, "room": 5, "generation": 7}
    reason = wire.KINDS[b"failed"]
    assert reason is wire.Failed
    from statelink.backend import Moved
    from statelink.errors import Reason
    from statelink.plan import Assignment

    why = Reason("x", "what", {"a": "b"}, "cause", "hint")
    items = {"kv": wire.ItemList(0, bytes(104)), "aux": wire.ItemList(0, bytes(8))}
    messages: list[wire.Message] = [
        wire.Attach(sender=name, to=link.name, assignment=Assignment(0, 0, ()), destinations=1, digest=bytes(16)),
        wire.Attached(sender=name, to=link.name, digest=bytes(16)),
        wire.Request(**use, tokens=200, prefix=0, items=items, prepared={"kv": b"x"}),
        wire.Chunk(**use, number=0, granules={"kv": (0, 3)}, layers=(0, 2), nbytes=77),
        wire.Finished(**use, digest=bytes(16), moved={"kv": Moved(1, 2)}, chunks=1),
        wire.Received(**use),
        wire.Failed(**use, reason=why),
        wire.Drained(**use),
        wire.Note(**use, component="kv", payload=b"hello"),
        wire.Refuse(sender=name, to=link.name, reason=why),
        wire.Ping(sender=name, to=link.name),
        wire.Pong(sender=name, to=link.name),
        wire.Unknown(sender=name, to=link.name),
        wire.Bye(sender=name, to=link.name),
    ]
    return [wire.encode(message) for message in messages]


def mutated(frames: list[bytes], order: random.Random) -> list[bytes]:
    """The same frames, with something wrong."""
    kind, body = frames
    raw = bytearray(body)
    choice = order.randrange(9)
    if choice == 0:
        return [kind, bytes(raw[: order.randrange(len(raw))])]
    if choice == 1:
        raw[order.randrange(len(raw))] = order.randrange(256)
        return [kind, bytes(raw)]
    if choice == 2:
        at = order.randrange(len(raw))
        return [kind, bytes(raw[:at]) + order.randbytes(order.randrange(1, 40)) + bytes(raw[at:])]
    if choice == 3:
        return [order.choice(list(wire.KINDS)), body]
    if choice == 4:
        return [kind, body, order.randbytes(8)]
    if choice == 5:
        return [kind]
    if choice == 6:
        return [kind, b"\x91" * order.randrange(1, 3000) + body]
    if choice == 7:
        return [order.randbytes(order.randrange(20)), order.randbytes(order.randrange(200))]
    found = msgspec.msgpack.decode(body)
    field = order.choice(list(found))
    found[field] = order.choice(
        [None, -1, 2**63, 2**64 - 1, 1.5, "", "x" * 5000, b"", [], {}, [[[]]], {"a": {"b": {}}}, True, [1] * 100]
    )
    return [kind, msgspec.msgpack.encode(found)]


@pytest.fixture(params=["prefill", "decode"])
def link(request: pytest.FixtureRequest, pair: Pair) -> Iterator[LinkHandle]:
    """A link that has a room open meanwhile; it ends well."""
    case = pair.case()
    receiving, sending = pair.begin(case)
    sending.push(case.span(0, 96, pair.prefill.memory.pools), span=(0, 96))
    receiving.reach(Status.TRANSFERRING)
    yield pair.prefill if request.param == "prefill" else pair.decode
    sending.push(case.span(96, 200, pair.prefill.memory.pools), span=(96, 200))
    pair.ended(case, receiving, sending)


def test_introductions_that_are_almost_right(link: LinkHandle, pair: Pair) -> None:
    """A hello carries everything that a rank holds; each part of it may be nonsense."""
    role = "decode" if link is pair.prefill else "prefill"
    card = bytes(wire.write_handshake(peers.handshake_of("stranger", role, link.memory.inventory("stranger"))))
    order = random.Random(3)
    heard: Counter[bytes] = Counter()
    before = dropped(link)
    sent = 300
    with peers.dialled(link.address, "stranger") as socket:

        def answers() -> int:
            while socket.poll(0, zmq.POLLIN):
                heard[socket.recv_multipart()[0]] += 1
            return heard[b"refuse"] + heard[b"welcome"]

        for _ in range(sent):
            tree = msgspec.msgpack.decode(card)
            _spoil(tree, order)
            raw = msgspec.msgpack.encode(tree)
            body = msgspec.msgpack.encode({"sender": "stranger", "to": "", "handshake": order.choice([raw, tree])})
            socket.send_multipart([b"hello", body])
            answers()
        peers.until(lambda: answers() + dropped(link) - before >= sent)
        assert heard.keys() <= {b"refuse", b"welcome", b"ping", b"pong"}  # signs of life come with heartbeats
        assert heard[b"refuse"] > sent // 10
        socket.send_multipart([b"bye", wire.encode(wire.Bye(sender="stranger", to=link.name))[1]])
        peers.until(lambda: "stranger" not in link.snapshot()["peers"])


def _spoil(tree: Any, order: random.Random) -> None:
    """Change one value somewhere in a tree of maps and lists."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = order.choice(keys)
        inner = tree[key]
        if isinstance(inner, (dict, list)) and inner and order.random() < 0.85:
            tree = inner
            continue
        tree[key] = order.choice(
            [None, -1, 0, 1, 2**31, 2**62, 2**63, 2**64 - 1, 1.5, "", "kv", "x" * 3000, b"", [], {}, [[]], True]
        )
        return
