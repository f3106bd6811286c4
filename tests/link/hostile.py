"""Frames that hostile processes send to a link's control port: kinds of them, and who sends them.

Each kind sends so many messages to a target, and returns once the link has taken the last of them. Nobody here holds a
key: the links under attack have none.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from tests.helpers.fakes import FakeDecode
from tests.helpers.peers import PART, cut, dialled, handshake_of, raw_bytes, until
from tests.link.test_malformed import examples, mutated
from tests.wire.largest import CASES

from statelink import wire
from statelink.errors import Reason

if TYPE_CHECKING:
    import zmq
    from tests.helpers.engine import LinkHandle

PATIENCE = 300.0
"""Seconds that a link may take for what was sent to it before. Lateness is measured elsewhere."""

_names = itertools.count()


@dataclass(frozen=True)
class Target:
    """A link under attack, and the room ids that honest peers use about this time."""

    link: LinkHandle
    role: str
    rooms: Callable[[], range]

    def named(self) -> str:
        """A name that nobody has had."""
        return f"evil-{os.getpid()}-{next(_names)}"

    def hello(self, name: str, **changes: Any) -> list[bytes]:
        """The introduction of a link that would go with it; ``changes`` are of its inventory."""
        theirs = "decode" if self.role == "prefill" else "prefill"
        card = handshake_of(name, theirs, self.link.memory.inventory("evil"))
        tree: dict[str, Any] = msgspec.msgpack.decode(bytes(wire.write_handshake(card)))
        tree["inventory"].update(changes)
        return [b"hello", msgspec.msgpack.encode({"sender": name, "handshake": tree})]


Message = Iterable[list[bytes]]
"""The frames that a message travels in, one after the other where it is sent in parts."""
Makes = Callable[[Target, str, Random], Message]
Sends = Callable[[Target, int, Random], None]
"""What makes a message from a sender's name, and what sends so many messages."""


def drain(socket: zmq.Socket[bytes]) -> None:
    while socket.poll(0):
        socket.recv_multipart()


@contextlib.contextmanager
def speaker(target: Target, name: str, guest: bool) -> Iterator[zmq.Socket[bytes]]:
    """A connection to a target, introduced or not; when it ends, the target has taken everything that was said."""
    with dialled(target.link.address, name) as socket:
        if guest:
            socket.send_multipart(target.hello(name))
            assert socket.poll(int(1000 * PATIENCE))
        yield socket
        drain(socket)
        prefill = target.role == "prefill"
        question = wire.encode(wire.Ping(sender=name, to=target.link.name)) if prefill else target.hello(name)
        answers = (b"pong", b"unknown") if prefill else (b"welcome", b"refuse")

        def answered() -> bool:
            found = False
            socket.send_multipart(question)  # again: who sent what is too large is cut off, and with it what comes next
            while socket.poll(50 if found else 2000):
                found |= socket.recv_multipart()[0] in answers
            return found

        until(answered, PATIENCE)
        until(lambda: not target.link.snapshot()["load"]["handshakes"], PATIENCE)


def said(make: Makes, *, guest: bool = False, at_once: int = 1, a_name: int = 1 << 30) -> Sends:
    """By so many senders at once, who introduce themselves if they are guests; after so many messages, by others."""

    def send(target: Target, count: int, order: Random) -> None:
        todo = iter(range(count))
        while numbers := list(itertools.islice(todo, a_name)):
            with contextlib.ExitStack() as stack:
                names = [target.named() for _ in range(at_once)]
                senders = [(name, stack.enter_context(speaker(target, name, guest))) for name in names]
                for number in numbers:
                    name, socket = senders[number % at_once]
                    for frames in make(target, name, order):
                        socket.send_multipart(frames, copy=False)
                    drain(socket)

    return send


def noise(target: Target, name: str, order: Random) -> Message:
    """No message at all."""
    return [[order.randbytes(order.choice([0, 1, 5, 60, 4000])) for _ in range(order.choice([1, 2, 2, 2, 3, 10]))]]


def changed(target: Target, name: str, order: Random) -> Message:
    """A message that is almost right."""
    return [mutated(order.choice(examples(target.link, name)), order)]


def changed_of_guest(target: Target, name: str, order: Random) -> Message:
    """The same or an introduction, which may be right: a changed message may have been a Bye."""
    choice = order.random()
    if choice > 0.08:
        return changed(target, name, order)
    return [target.hello(name) if choice < 0.02 else mutated(target.hello(name), order)]


def claim(target: Target, name: str, order: Random) -> Message:
    """A request or a failure of a room that honest peers use."""
    link: dict[str, Any] = {"sender": name, "to": target.link.name}
    use = {**link, "room": order.choice(target.rooms()), "generation": order.randrange(1, 1 << 62)}
    reason = Reason("room.aborted", "decode aborted the request", {}, "evil", "")
    request = wire.Request(**use, tokens=order.choice((16, 17)), prefix=0, items={"kv": wire.ItemList(0, bytes(8))})
    return [wire.encode(order.choice([request, wire.Failed(**use, reason=reason)]))]


def changed_introduction(target: Target, name: str, order: Random) -> Message:
    """A Hello whose card holds nonsense somewhere."""
    field = order.choice(("ranks", "rank", "regions", "components", "axes", "instance", "model"))
    nonsense: list[Any] = [None, -1, 1 << 62, "", "x" * 3000, [], {}, [[]], [[1, 1 << 63, "dram"]] * 500]
    return [target.hello(name, **{field: order.choice(nonsense)})]


def large(kind: str, *sizes: int) -> Makes:
    """Messages of about these sizes that take as long as possible to read, of a kind, or of every kind if it is empty.

    Of those that are as small as any message, some are changed.
    """

    def made(target: Target, name: str, order: Random) -> Message:
        case = order.choice([each for each in CASES if each.startswith(kind)])
        tree = {**CASES[case](order.choice(sizes)), "sender": name, "to": target.link.name}
        if "room" in tree:
            tree["room"] = order.choice(target.rooms())
        frames = [case.partition(":")[0].encode(), msgspec.msgpack.encode(tree)]
        return [mutated(frames, order)] if len(frames[1]) < 4000 and order.random() < 0.3 else cut(frames)

    return made


def zeros(nbytes: int) -> Makes:
    """Frames of so many bytes."""
    return lambda target, name, order: [[order.choice([b"hello", b"request", b"failed", b"nothing"]), bytes(nbytes)]]


def babble(target: Target, count: int, order: Random) -> None:
    """Bytes that are not even ZeroMQ's, each time over a connection of their own."""
    for _ in range(count):
        begun = order.choice([b"\xff" + bytes(8) + b"\x7f\x03", b"", b"GET / HTTP/1.1\r\n"])
        raw_bytes(target.link.address, begun + order.randbytes(64))


def new_names(target: Target, count: int, order: Random) -> None:
    """Right introductions, each of another link."""
    for _ in range(count):
        name = target.named()
        with dialled(target.link.address, name) as socket:
            socket.send_multipart(target.hello(name))
            assert socket.poll(int(1000 * PATIENCE))


def requests_of_an_attached_decode(target: Target, count: int, order: Random) -> None:
    """From a right link that prefill has attached: rooms that its engine never opens, and large lists."""
    fake = FakeDecode(target.link.memory.path.parent, target.link.address, target.link.memory.pools)
    link: dict[str, Any] = {"sender": fake.name, "to": target.link.name}
    fake.attach()
    try:
        for number in range(count):
            use: dict[str, Any] = {"room": (1 << 40) + order.randrange(1 << 20), "generation": number + 1}
            items = {"kv": wire.ItemList(0, bytes(8 * order.choice((1, 100, 10_000, 50_000))))}
            prepared = {f"x{n}": b"" for n in range(order.choice((0, 1, 1000)))}
            fake.say(wire.Request(**link, **use, tokens=1 << 30, prefix=0, items=items, prepared=prepared))
            fake.silent(wire.Failed, 0.0)
        fake.say(wire.Ping(**link))
        fake.hear(wire.Pong, timeout=PATIENCE)
        fake.say(wire.Bye(**link))
        until(lambda: fake.name not in target.link.snapshot()["peers"])
    finally:
        fake.close()


class Kind(NamedTuple):
    """How to send so many frames of a kind, how many are among a hundred thousand, and whom they go to."""

    send: Sends
    number: int
    sides: tuple[str, ...] = ("prefill", "decode")


KINDS: dict[str, Kind] = {
    "random frames": Kind(said(noise), 16_000),
    "connections that babble": Kind(babble, 500),
    "changed frames": Kind(said(changed), 20_400),
    "changed frames of a guest": Kind(said(changed_of_guest, guest=True), 20_000),
    "claims on rooms of others": Kind(said(claim, guest=True), 16_000),
    "changed introductions": Kind(said(changed_introduction), 5_000),
    "introductions under new names": Kind(new_names, 2_400),
    "laborious introductions": Kind(said(large("hello: ", 3_000, 14_000, 15_500, 66_000), a_name=25), 1_000),
    "largest introductions": Kind(said(large("hello: ", wire.MAX_INVENTORY - (64 << 10)), a_name=1), 40),
    "largest requests": Kind(said(large("request: ", 32 << 20, 8 << 20), guest=True), 60),
    "messages of every kind": Kind(said(large("", 1_000, 14_000), guest=True), 10_000),
    "large messages of every kind": Kind(said(large("", 66_000, 1_000_000), at_once=4), 400),
    "requests of an attached decode": Kind(requests_of_an_attached_decode, 4_000, ("prefill",)),
    "largest frames": Kind(said(zeros(PART), at_once=4), 4_000),
    "frames of 63 MB": Kind(said(zeros(63 << 20), at_once=4), 200),
}
"""Kinds of frames. All of them together are a hundred thousand."""
