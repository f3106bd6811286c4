"""Wrong addresses of every kind: the reason of the room, and the log, tell one from the other."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from tests.helpers import peers
from tests.helpers.links import DECODE, PREFILL, STRANGE, keys, link_of

import statelink
from statelink import Status, wire
from statelink.errors import Reason
from statelink.rendezvous import RendezvousServer
from statelink.wire import Trouble


def greeting(mechanism: bytes) -> bytes:
    """What a socket of ZeroMQ says first (ZMTP 3.0, https://rfc.zeromq.org/spec/23): whether it has keys, above all."""
    return b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


@contextlib.contextmanager
def port(reply: bytes | None) -> Iterator[str]:
    """Something else that listens: it answers so and hangs up, or says nothing at all."""
    server = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = server.accept()
                held.append(caller)
                if reply is not None:
                    with contextlib.suppress(OSError):
                        caller.recv(64)
                        caller.sendall(reply)
                    caller.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
    finally:
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(10)
        for each in held:
            each.close()


@contextlib.contextmanager
def deaf() -> Iterator[str]:
    """A port whose queue of connections is full: further attempts are not answered, as behind a firewall."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                caller.connect(server.getsockname())
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def mute() -> Iterator[str]:
    """A socket of ZeroMQ that reads and never answers, as that of a link whose engine hangs."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = context.socket(zmq.ROUTER)
    made.linger = 0
    number = made.bind_to_random_port("tcp://127.0.0.1")
    try:
        yield f"tcp://127.0.0.1:{number}"
    finally:
        made.close()
        context.term()


def free() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"tcp://127.0.0.1:{taken.getsockname()[1]}"


def hint(trouble: Trouble, ours: dict[str, str]) -> str:
    """What to look at; where the other side lacks this side's key, with that key."""
    return f"{trouble.hint}: {ours['public']}" if trouble is Trouble.KEY else trouble.hint


def ends(link: statelink.Link, addresses: dict[str, tuple[str, Trouble]], deadline: float = 2.0) -> None:
    """Ask at all of these at once; each room says what is wrong with its address."""
    rooms = {
        what: link.receive(number, address, 4, deadline=deadline)
        for number, (what, (address, _)) in enumerate(addresses.items(), 1)
    }
    for what, room in rooms.items():
        assert room.wait(30) is Status.FAILED
        assert room.reason is not None
        address, trouble = addresses[what]
        assert f"no answer from {address.partition('@')[0]} ({trouble.what})" in room.reason.cause, what
        assert room.reason.hint == hint(trouble, STRANGE), what


def test_each_wrong_address_has_its_own_reason() -> None:
    http = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"
    with port(http) as web, port(None) as silent, deaf() as full, mute() as hanging, link_of("decode") as link:
        ends(
            link,
            {
                "a refused port": (free(), Trouble.REFUSED),
                "an unknown host": ("tcp://no-such-host.invalid:7000", Trouble.UNKNOWN_HOST),
                "another program's port": (web, Trouble.ENDED),
                "a port that says nothing": (silent, Trouble.SILENT),
                "a port that does not answer": (full, Trouble.NO_ANSWER),
                "a link that hangs": (hanging, Trouble.MUTE),
            },
        )


def test_each_wrong_key_has_its_own_reason() -> None:
    with (
        link_of("prefill", keys=keys(PREFILL, DECODE)) as prefill,
        link_of("decode", keys=keys(STRANGE, PREFILL, DECODE)) as stranger,
    ):
        address = prefill.address.partition("@")[0]
        ends(
            stranger,
            {
                "a key that is not allowed": (prefill.address, Trouble.KEY),
                "another's key in the address": (peers.keyed(address, DECODE), Trouble.ENDED),
            },
        )


def test_keys_on_one_side_alone_are_the_reason() -> None:
    with port(greeting(b"NULL")) as plain, link_of("decode", keys=keys(DECODE, PREFILL)) as decode:
        ends(decode, {"no keys there": (peers.keyed(plain, PREFILL), Trouble.KEYS)}, 1.0)
    with port(greeting(b"CURVE")) as secured, link_of("decode") as decode:
        ends(decode, {"no keys here": (secured, Trouble.KEYS)}, 1.0)


def test_a_connection_that_is_made_anew_keeps_what_was_found() -> None:
    """Who stays silent is dialled again and again; what was found before counts until more is known."""
    with (
        link_of("prefill", keys=keys(PREFILL, DECODE)) as prefill,
        link_of("decode", keys=keys(STRANGE, PREFILL), heartbeat=0.02, liveness=0.2) as stranger,
    ):
        ends(stranger, {"a key that is not allowed": (prefill.address, Trouble.KEY)}, 3.0)


def test_nothing_watches_a_peer_that_has_answered() -> None:
    """Why it does not answer is watched until it does: a link that is at work has no file descriptors for that."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.ROUTER) as peer, link_of("decode") as decode:
        port = peer.bind_to_random_port("tcp://127.0.0.1")
        room = decode.receive(1, f"tcp://127.0.0.1:{port}", 32)
        routing = peer.recv_multipart()[0]
        before = descriptors()
        refusal = wire.Refuse(sender="p", to=decode.name, reason=Reason("x.y", "not now"))
        peer.send_multipart([routing, *wire.encode(refusal)])
        assert room.wait(20) is Status.FAILED
        peers.until(lambda: descriptors() < before, 5.0)  # it is dialled anew some time later


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("code", "limits"), [("peer.unreachable", {"liveness": 2.0}), ("room.deadline", {"deadline": 1.0})]
)
def test_a_lack_of_threads_is_in_the_reason(code: str, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill is there, and no thread of decode's looks it up."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("statelink-setup"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with link_of("prefill") as prefill, link_of("decode", heartbeat=0.1, **limits) as link:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            room = link.receive(1, prefill.address, 4)
            assert room.wait(30) is Status.FAILED
        assert room.reason is not None
        assert room.reason.code == code
        assert room.reason.cause.endswith("; jobs of this link wait for a thread: can't start new thread")
        assert "ulimit -u" in room.reason.hint


@pytest.mark.parametrize("server", ["not there", "does not allow the key", "knows nobody"])
def test_the_rendezvous_is_in_the_reason(server: str) -> None:
    with contextlib.ExitStack() as stack:
        allowed = DECODE if server == "knows nobody" else STRANGE
        made = stack.enter_context(RendezvousServer(keys=keys(PREFILL, allowed)))
        address = peers.keyed(free(), PREFILL) if server == "not there" else made.address
        link = stack.enter_context(link_of("decode", keys=keys(DECODE, PREFILL), rendezvous=address))
        room = link.receive(1, "prefill-0", 4, deadline=2.0)
        assert room.wait(30) is Status.FAILED
        assert room.reason is not None
        said = f"the rendezvous server at {address.partition('@')[0]}"
        trouble = {"not there": Trouble.REFUSED, "does not allow the key": Trouble.KEY}.get(server)
        if trouble is None:
            assert f"is still resolving; nobody of this name is registered with {said}" in room.reason.cause
        else:
            assert f"is still resolving; {said} does not answer: {trouble.what}" in room.reason.cause
            assert room.reason.hint == hint(trouble, DECODE)


def test_the_rendezvous_is_in_the_reason_of_prefill() -> None:
    """Decode cannot find a prefill that is not registered, and so never asks it for the room."""
    address = free()
    with link_of("prefill", rendezvous=address) as link:
        room = link.send(1, 4, deadline=3.0)
        assert room.wait(30) is Status.FAILED
        assert room.reason is not None
        said = f"decode never asked for it; the rendezvous server at {address} does not answer: {Trouble.REFUSED.what}"
        assert (room.reason.cause, room.reason.hint) == (said, Trouble.REFUSED.hint)
