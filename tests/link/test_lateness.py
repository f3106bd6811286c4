"""Hostile frames of every kind at both sides of an honest pair, which has rooms with deadlines meanwhile.

Each link is in a process of its own, and the frames come from this one. No room of the pair may fail or get wrong
bytes, and a room that nobody serves fails at its deadline. How late everything comes is measured; the long run asserts
that no deadline comes a second late. Each kind of frames is sent in so many messages to a link's control port, until
the link has taken the last of them. Nobody here holds a key: the links under attack have none.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
from tests.helpers.fakes import FakeDecode
from tests.helpers.peers import PART, cut, dialled, handshake_of, raw_bytes, until
from tests.helpers.pools import Kv
from tests.link import honest
from tests.link.test_malformed import examples, mutated
from tests.wire.largest import CASES
from tests.wire.noise import resident

from statelink import wire

if TYPE_CHECKING:
    import zmq
    from tests.helpers.engine import LinkHandle
    from tests.link.conftest import TwoEngines

POOLS = (Kv(layers=(0,), pages=1024, heads=1, dtype="uint8"),)
MEGABYTE = 1 << 20
MOST = 256
"""Megabytes by which a side may grow: less than what it is sent."""
LATEST = 1.0
"""Seconds that a deadline may come late in the long run."""
SHARE = 1000
"""The short run sends one frame for each so many of the long one, and at least one of each kind."""
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
    """A request for a room that honest peers use. A failure of one would count: anybody may give a room up."""
    link: dict[str, Any] = {"sender": name, "to": target.link.name}
    use = {**link, "room": order.choice(target.rooms()), "generation": order.randrange(1, 1 << 62)}
    request = wire.Request(**use, tokens=order.choice((16, 17)), prefix=0, items={"kv": wire.ItemList(0, bytes(8))})
    return [wire.encode(request)]


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


@dataclass
class Siege:
    """An honest pair, and what is done to it.

    Attributes:
        links: By role.
        phases: Kind of frames, whom they went to, and when that began and ended.
        sent: Frames.
    """

    links: dict[str, LinkHandle]
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    sent: int = 0

    def begin(self) -> None:
        self.start = time.monotonic() + 0.2
        for link in self.links.values():
            link.engine(honest.begin, link.key, self.links["prefill"].address, self.start)

    def rooms(self) -> range:
        """Ids of requests that are, or will soon be, open."""
        now = int((time.monotonic() - self.start) / honest.PERIOD)
        return range(max(honest.FIRST + now - 10, honest.FIRST), honest.FIRST + max(now, 0) + 30)

    def attack(self, kind: str, count: int, order: Random) -> None:
        """Send frames of a kind, the same number to each side."""
        sides = KINDS[kind].sides
        began = time.monotonic()
        for role in sides:
            KINDS[kind].send(Target(self.links[role], role, self.rooms), -(-count // len(sides)), order)
            self.sent += -(-count // len(sides))
        self.phases.append((kind, began, time.monotonic()))

    def end(self) -> dict[str, honest.Found]:
        last = time.monotonic() + 0.5
        for link in self.links.values():
            link.engine.start(honest.end, link.key, last)
        return {role: link.engine.result() for role, link in self.links.items()}


def besiege(two_engines: TwoEngines, scale: int, tell: Callable[[str], None]) -> float:
    """Every kind of frame; returns by how many seconds the latest deadline came late."""
    seed = int(os.environ.get("STATELINK_SEED") or secrets.randbits(32))
    order = Random(seed)
    pair = two_engines.pair(POOLS, POOLS, deadline=60.0)
    pair.run(64)
    siege = Siege({"prefill": pair.prefill, "decode": pair.decode})
    before = {role: resident(link.engine.pid) for role, link in siege.links.items()}
    siege.begin()
    time.sleep(0.5)
    siege.phases.append(("nothing", siege.start, time.monotonic()))
    for kind, (_, count, _) in KINDS.items():
        siege.attack(kind, max(2, count // scale), order)
        tell(f"hostile frames, {kind}: sent in {siege.phases[-1][2] - siege.phases[-1][1]:.1f} s")
    found = siege.end()
    late = [each for side in found.values() for each in side.late]
    took = [each for side in found.values() for each in side.took]
    for kind, began, ended in siege.phases:
        worst = [
            max((took for at, took in seen if at + took >= began and at < ended), default=0.0) for seen in (late, took)
        ]
        tell(f"hostile frames, {kind}: latest deadline {worst[0]:.3f} s late, longest request {worst[1]:.3f} s")
    grown = {role: (resident(link.engine.pid) - before[role]) / MEGABYTE for role, link in siege.links.items()}
    seconds = sorted(each for _, each in took)
    wrong = [each for side in found.values() for each in side.wrong]
    latest = max(each for _, each in late)
    tell(
        f"hostile frames: {siege.sent} sent, latest of {len(late)} deadlines {latest:.3f} s late; {len(took)} honest "
        f"rooms, {len(wrong)} failed or wrong, median {1e3 * seconds[len(seconds) // 2]:.1f} ms, longest "
        f"{seconds[-1]:.3f} s; memory prefill {grown['prefill']:+.0f} MiB, decode {grown['decode']:+.0f} MiB; "
        f"seed {seed}"
    )
    assert not wrong, wrong[:5]
    assert max(grown.values()) < MOST
    assert len(took) > 10
    for link in siege.links.values():
        seen = link.snapshot()
        assert seen["quarantined"] == []
        assert not any(seen["rooms"].values()), seen["rooms"]
    return latest


@pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")
def test_an_honest_pair_is_served_among_hostile_frames(two_engines: TwoEngines, tell: Callable[[str], None]) -> None:
    besiege(two_engines, SHARE, tell)


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")
def test_no_deadline_is_late_among_a_hundred_thousand_hostile_frames(
    two_engines: TwoEngines, tell: Callable[[str], None]
) -> None:
    assert besiege(two_engines, 1, tell) <= LATEST
