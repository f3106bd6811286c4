"""What answers at etcd's address is something else, and wants the link's memory, its time or its password."""

from __future__ import annotations

import base64
import gzip
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.peers import until

from statelink.config import LinkConfig
from statelink.errors import PeerError
from statelink.rendezvous import DirectoryConfig, list_instances
from statelink_etcd import EtcdDirectory, Options, Waits

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
Does = Callable[["Exchange", str], object]


class Exchange(http.server.BaseHTTPRequestHandler):
    """One connection of the link."""

    protocol_version = "HTTP/1.1"
    server: Impostor

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.heard.append((self.path, self.headers, raw))
        try:
            self.server.does(self, self.path)
        except OSError:  # the link has ended the connection
            self.close_connection = True

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def begin(self) -> None:
        """Begin an answer whose length nobody says."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def part(self, body: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(body), body))
        self.server.sent += len(body)


class Impostor(http.server.ThreadingHTTPServer):
    """Listens where a link expects etcd."""

    daemon_threads = True

    def __init__(self, does: Does) -> None:
        self.does, self.sent = does, 0
        self.heard: list[tuple[str, Any, bytes]] = []
        super().__init__(("127.0.0.1", 0), Exchange)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def address(self) -> str:
        return f"etcd://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


@pytest.fixture
def impostor() -> Iterator[Callable[[Does], Impostor]]:
    made: list[Impostor] = []

    def make(does: Does) -> Impostor:
        made.append(Impostor(does))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def asks() -> Iterator[Callable[..., EtcdDirectory]]:
    """Makes clients that look for the instance ``p``."""
    made: list[EtcdDirectory] = []

    def make(server: Impostor, options: Options | None = None) -> EtcdDirectory:
        config = DirectoryConfig(server.address, options or Options())
        made.append(EtcdDirectory(config, link="asks", waits=Waits(answer=20.0)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def says(client: EtcdDirectory, text: str) -> None:
    def look() -> bool:
        client.resolve("p")
        return text in client.explain("p")[0]

    until(look, 60, f"{text!r}, not {client.explain('p')},")


def found(*pairs: tuple[bytes, bytes], more: bool = False) -> bytes:
    """What etcd answers to a question for keys."""
    kvs = [
        {name: base64.b64encode(raw).decode() for name, raw in zip(("key", "value"), pair, strict=True)}
        for pair in pairs
    ]
    return json.dumps({"header": {"revision": "7"}, "kvs": kvs, "more": more}).encode()


def entry(rank: int, ranks: int) -> tuple[bytes, bytes]:
    record = {"link": f"p.{rank}", "address": f"tcp://10.0.0.{rank}:7000", "ranks": ranks}
    return b"/statelink/instances/p/%04d" % rank, json.dumps(record).encode()


def user(folder: Path) -> Options:
    password = folder / "password"
    password.write_text("secret")
    password.chmod(0o600)
    return Options(user="fleet", password_file=str(password))


def test_an_answer_that_is_compressed_is_not_unpacked(impostor: Any, asks: Any) -> None:
    bomb = gzip.compress(bytes(64 * MIB))
    server = impostor(lambda to, path: to.answer(bomb, Content_Encoding="gzip"))
    says(asks(server), "does not answer: what answers is no gateway of etcd: its answer is compressed (gzip)")
    assert {headers["Accept-Encoding"] for _, headers, _ in server.heard} == {"identity"}


@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_without_an_end_is_not_read_to_it(impostor: Any, asks: Any, status: int) -> None:
    def does(to: Exchange, path: str) -> None:
        to.send_response(status)
        to.send_header("Content-Length", str(1 << 40))
        to.end_headers()
        while True:
            to.wfile.write(bytes(MIB))
            to.server.sent += MIB

    server = impostor(does)
    says(asks(server), "is no gateway of etcd: a message of more than 16777216 bytes")
    # Buffers of both sockets hold some more.
    assert server.sent < 64 * MIB * len(server.heard)


def test_an_answer_of_many_small_objects_is_not_decoded(impostor: Any, asks: Any) -> None:
    many = b'{"kvs": [' + b"{}," * MIB + b"{}]}"
    says(asks(impostor(lambda to, path: to.answer(many))), "a message of more than 16384 objects")


@pytest.mark.parametrize("at", ["/v3/auth/authenticate", "/v3/kv/range", "/v3/watch"])
@pytest.mark.parametrize("status", [301, 307])
def test_nobody_is_followed_elsewhere(tmp_path: Path, impostor: Any, asks: Any, at: str, status: int) -> None:
    elsewhere = impostor(lambda to, path: to.answer(b"{}"))

    def does(to: Exchange, path: str) -> None:
        if path == at:
            to.answer(b"", status, Location=f"http://127.0.0.1:{elsewhere.server_port}/admin")
        else:
            to.answer(b'{"token": "t"}' if path == "/v3/auth/authenticate" else found(entry(0, 1)))

    server = impostor(does)
    client = asks(server, user(tmp_path))
    if at == "/v3/watch":  # what is known counts until no member answers a question
        until(lambda: client.resolve("p") and [path for path, _, _ in server.heard].count(at) > 1, 60)
    else:
        says(client, f"is no gateway of etcd: it sends this link elsewhere (HTTP status {status})")
    assert elsewhere.heard == []


def test_a_token_that_would_end_its_header_is_none(tmp_path: Path, impostor: Any, asks: Any) -> None:
    server = impostor(lambda to, path: to.answer(json.dumps({"token": "a\r\nX-Other: b"}).encode()))
    says(asks(server, user(tmp_path)), "is no gateway of etcd")
    assert {path for path, _, _ in server.heard} == {"/v3/auth/authenticate"}


def test_what_it_says_is_cut(impostor: Any, asks: Any) -> None:
    words = json.dumps({"code": 7, "message": "no " * MIB}).encode()
    client = asks(impostor(lambda to, path: to.answer(words, 403)))
    says(client, "refuses: no no no")
    assert len(client.explain("p")[0]) < 300


def test_a_key_that_is_no_text_is_named(impostor: Any, asks: Any) -> None:
    """Anybody who may write below the prefix can have written it."""
    other = b"/statelink/instances/p/\xff", b"{}"
    server = impostor(lambda to, path: to.answer(found(entry(0, 1), other)))
    says(asks(server), r"the entry of rank \xff is not one of Statelink")


@pytest.mark.parametrize("what", ["ranks", "bytes"])
def test_a_watch_that_tells_more_than_an_instance_has_is_left(impostor: Any, asks: Any, what: str) -> None:
    value = base64.b64encode(bytes(4 * MIB if what == "bytes" else 1)).decode()
    numbers = iter(range(1 << 30))

    def does(to: Exchange, path: str) -> None:
        if path != "/v3/watch":
            to.answer(found(entry(0, 1)))
            return
        to.begin()
        while True:
            keys = [base64.b64encode(b"%d" % next(numbers)).decode() for _ in range(2000 if what == "ranks" else 1)]
            events = [{"kv": {"key": key, "value": value}} for key in keys]
            to.part(json.dumps({"result": {"events": events}}).encode() + b"\n")

    server = impostor(does)
    client = asks(server)
    # It asks again for all keys, which it does only after it has left the watch.
    until(lambda: (client.resolve("p"), [path for path, _, _ in server.heard].count("/v3/kv/range") > 1)[1], 60)
    assert server.sent < 256 * MIB


@pytest.mark.parametrize("listed", ["the same", "endless"])
def test_a_list_without_an_end_is_left(impostor: Any, listed: str) -> None:
    numbers = iter(range(1 << 30))

    def does(to: Exchange, path: str) -> None:
        many = [(b"/statelink/instances/p/%09d" % next(numbers), b"{}") for _ in range(4000)]
        to.answer(found(entry(0, 1), more=True) if listed == "the same" else found(*many, more=True))

    server = impostor(does)
    config = LinkConfig.read({"role": "decode", "backend": "tcp", "rendezvous": server.address})
    with pytest.raises(PeerError, match="out of order" if listed == "the same" else "more than 65536 ranks"):
        list_instances(config, keys=None)
