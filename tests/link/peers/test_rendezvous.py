"""Links that find each other through a server in a process of its own, which may die."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from tests.helpers import peers
from tests.helpers.links import client
from tests.helpers.pair import Pair
from tests.helpers.pools import Aux, Kv
from tests.helpers.worker import Host

from statelink import Keys, wire
from statelink.errors import ConfigError
from statelink.rendezvous import Directory, RendezvousServer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helpers.engine import LinkHandle
    from tests.link.conftest import TwoEngines

pytestmark = pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")

_keys = [tuple(part.decode() for part in zmq.curve_keypair()) for _ in range(4)]
SERVER, PREFILL, DECODE, STRANGE = ({"public": public, "secret": secret} for public, secret in _keys)
_rooms = itertools.count(90_000)


def unused_port() -> int:
    """A port below those that the system gives to others, so that nobody takes it before the server does."""
    for port in random.sample(range(20000, 30000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("a hundred ports are in use")


class Served:
    """``statelink rendezvous`` in a process of its own, at one address however often it starts."""

    def __init__(self, *options: str) -> None:
        self._options = ["--listen", f"tcp://127.0.0.1:{unused_port()}", "--lifetime", "2", *options]
        self.address = ""
        self.start()

    def start(self) -> None:
        program = ["-c", "from statelink.cli import main; main()", "rendezvous", *self._options]
        self.process = subprocess.Popen([sys.executable, *program], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address.startswith("tcp://127.0.0.1:"), self.address

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    if made.process.poll() is None:
        assert made.end() == 0, "it ends when it is told to"


def keys(own: dict[str, str], allow: Sequence[dict[str, str]]) -> dict[str, Any]:
    return {"keys": {"secret": own["secret"], "allow": tuple(each["public"] for each in allow)}}


def found(link: LinkHandle, name: str, stage: str = "ready") -> bool:
    return str(link.snapshot()["peers"].get(name)) == stage


class Probe:
    """Asks a server as a link would."""

    def __init__(self, address: str) -> None:
        self._client = client(address, "probe")

    def addresses(self, instance: str) -> list[str]:
        return [str(each) for each in self._client.resolve(instance) or ()]

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.close()


def seek(asks: Directory, instance: str) -> str:
    """The address of an instance's one rank, once it is there."""
    found: list[wire.Endpoint] = []

    def look() -> bool:
        found.extend(asks.resolve(instance) or ())
        return bool(found)

    peers.until(look)
    return str(found[0])


class Named(Pair):
    """A pair whose decode knows prefill by its instance's name."""

    def receive(self, case: Any, **named: Any) -> Any:
        return self.decode.receive(case.room, "prefill", case.tokens, case.target, prefix=case.prefix, **named)


def test_its_death_hurts_no_pair_and_links_come_back_to_it(two_engines: TwoEngines, tmp_path: Path) -> None:
    """With keys on all sides. Killed, not ended; and what comes later finds what was there before."""
    everyone = (SERVER, PREFILL, DECODE)
    (tmp_path / "secret").write_text(SERVER["secret"])
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "allow").write_text("\n".join(each["public"] for each in everyone))
    served = Served("--secret-file", str(tmp_path / "secret"), "--allow-file", str(tmp_path / "allow"))
    try:
        assert wire.parse_endpoint(served.address).key == SERVER["public"]
        prefill = two_engines.open("prefill", rendezvous=served.address, **keys(PREFILL, everyone))
        decode = two_engines.open("decode", rendezvous=served.address, **keys(DECODE, everyone))
        pair = Named(prefill, decode)
        pair.run()

        served.kill()
        for _ in range(5):
            pair.run()
        late = two_engines.open("decode", rendezvous=served.address, **keys(DECODE, everyone))
        text = late.receive(next(_rooms), "prefill", 64, deadline=1.0).failed(10)
        assert "prefill instance prefill is still resolving; the rendezvous server at tcp://127.0.0.1:" in text
        assert "does not answer: the connection is refused" in text
        pair.run()

        served.start()
        Named(prefill, late).run()
        pair.run()
    finally:
        if served.process.poll() is None:
            assert served.end() == 0


def test_not_before_every_distinct_rank_is_there(two_engines: TwoEngines, served: Served) -> None:
    """Two ranks on each side; those of decode find each other in the same way."""
    pools = (Kv(replicated=True), Aux())

    def rank(role: str, number: int) -> LinkHandle:
        return two_engines.open(role, pools, instance=role, rank=number, ranks=2, rendezvous=served.address)

    first = rank("prefill", 0)
    decodes = [rank("decode", 0), rank("decode", 1)]
    rooms = [each.receive(next(_rooms), "prefill", 64, deadline=30) for each in decodes]
    again = rank("prefill", 0)  # another incarnation of the same rank, not another rank
    with Probe(served.address) as probe:
        peers.until(lambda: probe.addresses("decode") == [each.address for each in decodes])
        assert probe.addresses("prefill") == []
        assert all(found(each, "prefill", "resolving") for each in decodes)
        second = rank("prefill", 1)
        peers.until(lambda: all(found(each, "prefill") for each in decodes))
        assert probe.addresses("prefill") == [again.address, second.address]
        assert first.address not in probe.addresses("prefill")
        second.engine(Host.link, second.key, "close", 5.0)
        peers.until(lambda: probe.addresses("prefill") == [])  # it said goodbye
    for room in rooms:
        room.abort()


def test_a_key_that_is_not_allowed_registers_and_learns_nothing(backend: str) -> None:
    ours = Keys(secret=SERVER["secret"], allow=(PREFILL["public"], DECODE["public"]))
    theirs = [Keys(secret=each["secret"], allow=(SERVER["public"],)) for each in (PREFILL, DECODE, STRANGE)]
    with RendezvousServer(keys=ours) as server:
        clients = [
            client(server.address, wire.link_name(name, each), each)
            for name, each in zip(("p", "d", "s"), theirs, strict=True)
        ]
        prefill, decode, strange = clients
        try:
            prefill.register("p", 0, 1, peers.keyed("tcp://10.0.0.1:1", PREFILL))
            strange.register("q", 0, 1, peers.keyed("tcp://10.0.0.2:1", STRANGE))
            assert seek(decode, "p") == peers.keyed("tcp://10.0.0.1:1", PREFILL)
            peers.until(lambda: server.snapshot()["refused_keys"] > 0)
            assert strange.resolve("p") is None
            # One that is allowed cannot speak for another's key either, and cannot take its link's name.
            decode.register("p", 0, 1, peers.keyed("tcp://10.0.0.3:1", PREFILL))
            impostor = client(server.address, wire.link_name("p", theirs[0]), theirs[1])
            clients.append(impostor)
            impostor.register("r", 0, 1, peers.keyed("tcp://10.0.0.4:1", DECODE))
            peers.until(lambda: server.snapshot()["dropped_frames"].get("wire.sender", 0) > 0)
            assert strange.resolve("p") is None
            assert server.snapshot()["instances"] == {"p": "1 of 1"}
            assert seek(decode, "p") == peers.keyed("tcp://10.0.0.1:1", PREFILL)
        finally:
            for each in clients:
                each.close()


def test_what_cannot_be_configured(two_engines: TwoEngines) -> None:
    for address, text in (("nowhere", "is not an address"), (peers.keyed("tcp://127.0.0.1:1", SERVER), "has none")):
        with pytest.raises(ConfigError, match=text):
            two_engines.open("decode", rendezvous=address)
    with pytest.raises(ConfigError, match="allow-list"):
        two_engines.open("decode", rendezvous=peers.keyed("tcp://127.0.0.1:1", SERVER), **keys(DECODE, (PREFILL,)))
    with pytest.raises(ConfigError, match="without keys"):
        RendezvousServer("tcp://0.0.0.0:0", advertise="10.0.0.1")
    with pytest.raises(ConfigError, match="lifetime"):
        RendezvousServer(lifetime=0)
