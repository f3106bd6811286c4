"""Frames that hostile processes send to a link's control port: kinds of them, and who sends them.

Each kind is a function that sends so many frames to a target and returns how many it sent, once the link has taken the
last of them. Nobody here holds a key: the links under attack have none.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import zmq
from tests.helpers.fakes import FakeDecode
from tests.helpers.peers import PART, cut, dialled, handshake_of, raw_bytes, until
from tests.link.test_malformed import examples, mutated
from tests.wire.largest import CASES

from statelink import wire
from statelink.errors import Reason

if TYPE_CHECKING:
    import random

    from tests.helpers.engine import LinkHandle

__all__ = ["KINDS", "Target"]

PATIENCE = 300.0
"""Seconds that a link may take for what was sent to it before. Lateness is measured elsewhere."""
LARGE = 63 << 20
"""Bytes of a frame that is just not too large."""
ELSEWHERE = 1 << 40
"""Room ids from here on are nobody's."""
A_NAME = 25
"""Laborious introductions under one name."""
SOCKETS = 4
"""Connections that send large frames at once."""

_names = itertools.count()
Socket = zmq.Socket[bytes]


@dataclass
class Target:
    """A link under attack.

    Attributes:
        link: It.
        role: Its role.
        rooms: Room ids that honest peers use about this time.
    """

    link: LinkHandle
    role: str
    rooms: Callable[[], range]

    def named(self) -> str:
        """A name that nobody has had."""
        return f"evil-{os.getpid()}-{next(_names)}"

    def tree(self, name: str, **changes: Any) -> dict[str, Any]:
        """The card of a link that would go with it, as a tree; ``changes`` are of its inventory."""
        role = {"prefill": "decode", "decode": "prefill"}[self.role]
        card = handshake_of(name, role, self.link.memory.inventory("evil"))
        tree: dict[str, Any] = msgspec.msgpack.decode(bytes(wire.write_handshake(card)))
        return {**tree, "inventory": {**tree["inventory"], **changes}}

    def hello(self, name: str, **changes: Any) -> list[bytes]:
        """An introduction."""
        return [b"hello", msgspec.msgpack.encode({"sender": name, "handshake": self.tree(name, **changes)})]


@contextlib.contextmanager
def speaker(target: Target, name: str) -> Iterator[Socket]:
    """A connection to a target; when it ends, the target has taken everything that was said."""
    with dialled(target.link.address, name) as socket:
        yield socket
        settle(target, socket, name)


def settle(target: Target, socket: Socket, name: str) -> None:
    """Wait until a target has taken everything that a socket sent: it answers the question that comes last."""
    drain(socket)
    prefill = target.role == "prefill"
    question = wire.encode(wire.Ping(sender=name, to=target.link.name)) if prefill else target.hello(name)
    answers = (b"pong", b"unknown") if prefill else (b"welcome", b"refuse")
    end = time.monotonic() + PATIENCE
    answered = False
    while not answered:
        assert time.monotonic() < end, f"{target.role} has not answered for {PATIENCE} s"
        socket.send_multipart(question)  # again: who sent what is too large is cut off, and with it what comes next
        while socket.poll(50 if answered else 2000):
            answered |= socket.recv_multipart()[0] in answers
    until(lambda: not target.link.snapshot()["load"]["handshakes"], PATIENCE)


def drain(socket: Socket) -> None:
    while socket.poll(0):
        socket.recv_multipart()


def random_frames(target: Target, count: int, order: random.Random) -> None:
    """No messages at all."""
    with speaker(target, target.named()) as socket:
        for _ in range(count):
            frames = order.choice([1, 2, 2, 2, 3, 10])
            socket.send_multipart([order.randbytes(order.choice([0, 1, 5, 60, 4000])) for _ in range(frames)])


def connections_that_babble(target: Target, count: int, order: random.Random) -> None:
    """Bytes that are not even ZeroMQ's, each time over a connection of their own."""
    address = target.link.address
    for _ in range(count):
        raw_bytes(
            address, order.choice([b"\xff" + bytes(8) + b"\x7f\x03", b"", b"GET / HTTP/1.1\r\n"]) + order.randbytes(64)
        )


def changed_frames(target: Target, count: int, order: random.Random) -> None:
    """Messages that are almost right, from who was not introduced."""
    name = target.named()
    with speaker(target, name) as socket:
        good = examples(target.link, name)
        for _ in range(count):
            socket.send_multipart(mutated(order.choice(good), order))
            drain(socket)


def changed_frames_of_a_guest(target: Target, count: int, order: random.Random) -> None:
    """The same, from who was."""
    name = target.named()
    with speaker(target, name) as socket:
        good = [*examples(target.link, name), target.hello(name)]
        for number in range(count):
            if number % 50 == 0:
                socket.send_multipart(target.hello(name))
            socket.send_multipart(mutated(order.choice(good), order))
            drain(socket)


def claims_on_rooms_of_others(target: Target, count: int, order: random.Random) -> None:
    """Requests and failures of rooms that honest peers use, from who said Hello and no more."""
    name = target.named()
    reason = Reason("room.aborted", "decode aborted the request", {}, "evil", "")
    with speaker(target, name) as socket:
        socket.send_multipart(target.hello(name))
        for number in range(count):
            use: Any = {"sender": name, "to": target.link.name, "generation": order.randrange(1, 1 << 62)}
            room = order.choice(target.rooms())
            items = {"kv": wire.ItemList(0, bytes(8))}
            message: wire.Message = (
                wire.Request(**use, room=room, tokens=order.choice((16, 17)), prefix=0, items=items)
                if number % 2
                else wire.Failed(**use, room=room, reason=reason)
            )
            socket.send_multipart(wire.encode(message))
            drain(socket)


def changed_introductions(target: Target, count: int, order: random.Random) -> None:
    """A Hello whose card holds nonsense somewhere."""
    name = target.named()
    with speaker(target, name) as socket:
        for _ in range(count):
            field = order.choice(("ranks", "rank", "regions", "components", "axes", "instance", "model"))
            nonsense: Any = order.choice(
                [None, -1, 1 << 62, "", "x" * 3000, [], {}, [[]], [[1, 1 << 63, "dram"]] * 500]
            )
            socket.send_multipart(target.hello(name, **{field: nonsense}))
            drain(socket)


def introductions_under_new_names(target: Target, count: int, order: random.Random) -> None:
    """Right ones, each of another link."""
    for _ in range(count):
        name = target.named()
        with dialled(target.link.address, name) as socket:
            socket.send_multipart(target.hello(name))
            assert socket.poll(int(1000 * PATIENCE))


def laborious_introductions(target: Target, count: int, order: random.Random) -> None:
    """Cards of up to 66 KB that take as long as possible to check: layouts of many slabs, and the like."""
    cards = encoded("hello: ", (3_000, 14_000, 15_500, 66_000), count, order)
    for name in spread(target, count):
        with speaker(target, name) as socket:
            for _ in range(min(count, A_NAME)):
                send(socket, b"hello", {"sender": name, "handshake": msgspec.Raw(order.choice(cards)["handshake"])})
                drain(socket)


def largest_introductions(target: Target, count: int, order: random.Random) -> None:
    """Cards as large as one may be, of every kind that takes long."""
    cards = encoded("hello: ", (wire.MAX_INVENTORY - (64 << 10),), count, order)
    for number in range(count):
        name = target.named()
        with speaker(target, name) as socket:
            send(socket, b"hello", {"sender": name, "handshake": msgspec.Raw(cards[number % len(cards)]["handshake"])})


def largest_requests(target: Target, count: int, order: random.Random) -> None:
    """Requests as large as one may be, from who said Hello and no more."""
    name = target.named()
    requests = encoded("request: ", (32 << 20, 8 << 20), count, order)
    with speaker(target, name) as socket:
        socket.send_multipart(target.hello(name))
        for _ in range(count):
            use = {"sender": name, "to": target.link.name, "room": order.choice(target.rooms())}
            fields = {**order.choice(requests), **{key: msgspec.msgpack.encode(value) for key, value in use.items()}}
            send(socket, b"request", {key: msgspec.Raw(value) for key, value in fields.items()})
            drain(socket)


def encoded(prefix: str, sizes: Sequence[int], most: int, order: random.Random) -> list[dict[str, bytes]]:
    """At most so many messages of a kind: their fields, encoded."""
    choices = [(case, size) for case in CASES if case.startswith(prefix) for size in sizes]
    return [
        {key: msgspec.msgpack.encode(value) for key, value in CASES[case](size).items()}
        for case, size in order.sample(choices, min(most, len(choices)))
    ]


def spread(target: Target, count: int) -> Iterator[str]:
    """Names for so many messages: a link may read one message of a name at a time."""
    for _ in range(-(-count // A_NAME)):
        yield target.named()


def send(socket: Socket, kind: bytes, body: Any) -> None:
    """Say something, in parts where it is large."""
    for frames in cut([kind, msgspec.msgpack.encode(body)]):
        socket.send_multipart(frames, copy=False)


def frames_of_63_megabytes(target: Target, count: int, order: random.Random) -> None:
    """From several connections at once, none of which has said who it is."""
    body = bytes(LARGE)
    names = [target.named() for _ in range(SOCKETS)]
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(dialled(target.link.address, name)) for name in names]
        for socket in sockets:
            socket.sndhwm = 1
        for number in range(count):
            kind = order.choice([b"hello", b"request", b"failed", b"nothing"])
            sockets[number % SOCKETS].send_multipart([kind, body], copy=False)
        for socket, name in zip(sockets, names, strict=True):
            settle(target, socket, name)


def requests_of_an_attached_decode(target: Target, count: int, order: random.Random) -> None:
    """From a right link that prefill has attached: rooms that its engine never opens, and large lists."""
    fake = FakeDecode(target.link.memory.path.parent, target.link.address, target.link.memory.pools)
    fake.attach()
    try:
        for number in range(count):
            fake.say(
                wire.Request(
                    sender=fake.name,
                    to=target.link.name,
                    room=ELSEWHERE + order.randrange(1, 1 << 20),
                    generation=number + 1,
                    tokens=1 << 30,
                    prefix=0,
                    items={"kv": wire.ItemList(0, bytes(8 * order.choice((1, 100, 10_000, 50_000))))},
                    prepared={f"x{n}": b"" for n in range(order.choice((0, 1, 1000)))},
                )
            )
            fake.silent(wire.Failed, 0.0)
        fake.say(wire.Ping(sender=fake.name, to=target.link.name))
        fake.hear(wire.Pong, timeout=PATIENCE)
        fake.say(wire.Bye(sender=fake.name, to=target.link.name))
        until(lambda: fake.name not in target.link.snapshot()["peers"])
    finally:
        fake.close()


def largest_frames(target: Target, count: int, order: random.Random) -> None:
    """Frames that are just not too large, from several connections at once, of whom none has introduced itself."""
    names = [target.named() for _ in range(SOCKETS)]
    body = bytes(PART)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(speaker(target, name)) for name in names]
        for number in range(count):
            kind = order.choice([b"hello", b"request", b"failed", b"nothing"])
            sockets[number % SOCKETS].send_multipart([kind, body], copy=False)


class Kind(NamedTuple):
    """A kind of frames.

    Attributes:
        send: Sends so many of them to a target.
        number: How many of them are among a hundred thousand.
        sides: Roles of the links that they go to.
    """

    send: Callable[[Target, int, random.Random], None]
    number: int
    sides: tuple[str, ...] = ("prefill", "decode")


KINDS: dict[str, Kind] = {
    "random frames": Kind(random_frames, 22_000),
    "connections that babble": Kind(connections_that_babble, 500),
    "changed frames": Kind(changed_frames, 24_800),
    "changed frames of a guest": Kind(changed_frames_of_a_guest, 20_000),
    "claims on rooms of others": Kind(claims_on_rooms_of_others, 16_000),
    "changed introductions": Kind(changed_introductions, 5_000),
    "introductions under new names": Kind(introductions_under_new_names, 2_400),
    "laborious introductions": Kind(laborious_introductions, 1_000),
    "largest introductions": Kind(largest_introductions, 40),
    "largest requests": Kind(largest_requests, 60),
    "requests of an attached decode": Kind(requests_of_an_attached_decode, 4_000, ("prefill",)),
    "largest frames": Kind(largest_frames, 4_000),
    "frames of 63 MB": Kind(frames_of_63_megabytes, 200),
}
"""Kinds of frames. All of them together are a hundred thousand."""
