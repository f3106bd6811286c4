"""What the server keeps: when an instance is there, whose word counts, and what is refused."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest
from tests.helpers import links, peers
from tests.helpers.links import DECODE, PREFILL, keys, named

from statelink import wire
from statelink.errors import ConfigError, WireError
from statelink.rendezvous import RendezvousServer

LIFETIME = 600.0


class Server:
    """A server, and who speaks to it. Time passes when the test says so."""

    def __init__(self, secured: bool, patch: pytest.MonkeyPatch) -> None:
        self._own = DECODE if secured else None
        self._real = RendezvousServer(lifetime=LIFETIME, keys=keys(PREFILL, DECODE) if secured else None)
        self._names: dict[str, str] = {}
        self._later = 0.0
        monotonic = time.monotonic
        patch.setattr(time, "monotonic", lambda: monotonic() + self._later)

    def wait(self, lifetimes: float) -> None:
        self._later += lifetimes * LIFETIME

    @property
    def instances(self) -> dict[str, str]:
        found: dict[str, str] = self._real.snapshot()["instances"]
        return found

    def _name(self, label: str) -> str:
        """The name of the link that the test calls so."""
        return self._names.setdefault(label, named(label, self._own)) if self._own else label

    def say(self, message: wire.Message) -> wire.Message:
        """Say something; what is answered."""
        name = self._name(message.sender)
        with peers.dialled(self._real.address, name, self._own) as socket:
            socket.send_multipart(wire.encode(msgspec.structs.replace(message, sender=name)))
            assert socket.poll(20_000)
            return wire.decode(socket.recv_multipart(), wire.RENDEZVOUS_KINDS | wire.KINDS)

    def register(self, message: wire.Register) -> None:
        assert isinstance(self.say(message), wire.Registered)

    def leave(self, label: str) -> None:
        link = self._name(label)
        with peers.dialled(self._real.address, link, self._own) as socket:
            socket.send_multipart(wire.encode(wire.Bye(sender=link, to="")))
            socket.send_multipart(wire.encode(wire.Resolve(sender=link, to="", instance="p")))
            assert socket.poll(20_000), "it has not been read"

    def refused(self, message: wire.Register, code: str) -> str:
        """Why; and nothing else changes."""
        before = self.instances, self.found(message.instance)
        answer = self.say(message)
        assert isinstance(answer, wire.Refuse)
        assert answer.reason.code == f"rendezvous.{code}"
        assert (self.instances, self.found(message.instance)) == before
        return str(answer.reason)

    def found(self, instance: str = "p") -> tuple[list[str], int, int]:
        """Last number of each address, the ranks that are there, and those that should be."""
        answer = self.say(wire.Resolve(sender="asks", to="", instance=instance))
        assert isinstance(answer, wire.Resolved)
        last = [address.rpartition(".")[2].partition(":")[0] for address in answer.addresses]
        return last, answer.present, answer.ranks

    def close(self) -> None:
        self._real.close()


@pytest.fixture
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server(getattr(request, "param", False), monkeypatch)
    yield made
    made.close()


def rank(number: int, ranks: int = 2, *, link: str = "", instance: str = "p", key: str = "") -> wire.Register:
    address = str(wire.Endpoint(f"tcp://10.0.0.{number}:7000", key))
    sender = link or f"{instance}.{number}"
    return wire.Register(sender=sender, to="", instance=instance, rank=number, ranks=ranks, address=address)


def test_an_instance_is_there_when_every_distinct_rank_is(server: Server) -> None:
    assert server.found() == ([], 0, 0)
    server.register(rank(2, 3))
    server.register(rank(0, 3))
    for again in range(5):  # the same rank again and again is still one rank
        server.register(rank(0, 3, link=f"incarnation {again}"))
    assert server.found() == ([], 2, 3)
    server.register(rank(1, 3))
    assert server.found() == (["0", "1", "2"], 3, 3)
    assert server.instances == {"p": "3 of 3"}
    server.leave("p.1")
    assert server.found() == ([], 2, 3)


def test_a_server_listens_at_one_port() -> None:
    with pytest.raises(ConfigError, match="a rendezvous server listens at one port") as caught:
        RendezvousServer("tcp://127.0.0.1:7400-7410")
    assert caught.value.code == "config.listen"
    assert caught.value.hint == "write one port, such as tcp://10.0.0.5:7400"


def test_ranks_expire_unless_they_speak(server: Server) -> None:
    server.register(rank(0))
    server.wait(0.5)
    server.register(rank(1))
    server.wait(0.4)
    server.register(rank(0))
    server.wait(0.5)
    assert server.found()[0] == ["0", "1"]
    server.wait(0.2)
    assert server.found() == ([], 1, 2)
    server.wait(1.0)
    peers.until(lambda: server.instances == {})


def test_a_later_process_takes_the_place_and_keeps_it(server: Server) -> None:
    server.register(rank(0, 1, link="old"))
    server.register(wire.Register(sender="new", to="", instance="p", rank=0, ranks=1, address="tcp://10.0.0.9:7000"))
    assert server.found()[0] == ["9"]
    assert "new has taken its place" in server.refused(rank(0, 1, link="old"), "replaced")
    server.leave("old")  # its goodbye comes late, and is not about the other
    assert server.found()[0] == ["9"]
    server.wait(1.1)  # the later one has expired
    server.register(rank(0, 1, link="old"))
    assert server.found()[0] == ["0"]


def test_ranks_must_agree_on_their_number(server: Server) -> None:
    server.register(rank(0, 2))
    server.wait(0.5)
    server.register(rank(1, 2))
    text = server.refused(rank(2, 4, link="x"), "ranks")
    assert "there are 4 ranks, rank 0 that there are 2" in text
    server.wait(1.1)  # the earlier deployment has expired
    server.register(rank(0, 4, link="y"))
    assert server.found() == ([], 1, 4)
    server.register(rank(0, 1, link="z"))  # alone, a rank may come back as another number
    assert server.found()[0] == ["0"]


def test_a_process_has_one_place(server: Server) -> None:
    server.register(rank(0, 1, link="x"))
    server.register(rank(0, 1, link="x", instance="q"))
    assert server.instances == {"q": "1 of 1"}


@pytest.mark.parametrize("server", [True, False], ids=["keys", "no keys"], indirect=True)
def test_only_the_own_key_can_be_registered(server: Server, request: pytest.FixtureRequest) -> None:
    own = DECODE["public"] if request.node.callspec.id == "keys" else ""
    server.register(rank(0, key=own))
    for key in {"", DECODE["public"], PREFILL["public"]} - {own}:
        assert "not the one that it holds" in server.refused(rank(1, key=key), "key")
    wrong = wire.Register(sender="x", to="", instance="p", rank=1, ranks=2, address="nowhere")
    server.refused(wrong, "address")


@pytest.mark.parametrize("numbers", [(2, 2), (-1, 2), (0, 0), (0, 5000), (4096, 4096), (True, 2), (1.0, 2)])
def test_numbers_that_are_no_ranks(numbers: tuple[int, int]) -> None:
    tree = {"sender": "x", "instance": "p", "rank": numbers[0], "ranks": numbers[1], "address": ""}
    with pytest.raises(WireError) as caught:
        wire.decode([b"register", msgspec.msgpack.encode(tree)], wire.RENDEZVOUS_KINDS)
    assert caught.value.code == "wire.body"


@pytest.mark.parametrize("ends", ["closed", "stopped"])
def test_a_server_that_answered_before_is_found_out(ends: str, caplog: pytest.LogCaptureFixture) -> None:
    """A client that was connected cannot tell at first. It says so, and logs what a new connection finds."""
    code = "from statelink.cli import main; main(['rendezvous', '--listen', 'tcp://127.0.0.1:0'])"
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        client = links.client(server.stdout.readline().strip(), "asks")
        try:
            peers.until(
                lambda: client.resolve("p") is None and client.explain("p")[0].startswith("nobody of this name")
            )
            peers.until(lambda: client.explain("p")[0] != "" and not client.explain(None)[0])
            server.send_signal(signal.SIGKILL if ends == "closed" else signal.SIGSTOP)

            def said() -> str:
                client.resolve("p")
                return client.explain(None)[0]

            first = peers.until(said)
            assert first.endswith(f" does not answer: {wire.Trouble.QUIET.what}")
            logged = peers.until(
                lambda: client.resolve("p") or [each.getMessage() for each in caplog.records if "does not" in each.msg]
            )
        finally:
            client.close()
    finally:
        server.kill()
        server.communicate()
    trouble = wire.Trouble.REFUSED if ends == "closed" else wire.Trouble.SILENT
    assert [trouble.what in line for line in logged] == [True]
