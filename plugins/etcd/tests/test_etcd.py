"""Etcd as the directory, with a real server: who is found, who expires, whose word counts, and what is refused."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from tests.helpers.bad_values import escaped
from tests.helpers.etcd import Certificates, Etcd
from tests.helpers.peers import until

from statelink.config import LinkConfig
from statelink.errors import ConfigError
from statelink.rendezvous import DirectoryConfig, connecting
from statelink_etcd import Cluster, EtcdDirectory, Options, Waits

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("etcd_program")

LIFETIME = 2
WAITS = Waits(answer=3.0, refresh=2.0)
PATIENCE = 60.0
"""Seconds for what usually takes one or two: a cluster that gets no processor elects nobody."""
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    made = Etcd(tmp_path_factory.mktemp("etcd"))
    yield made
    made.kill()


class Fleet:
    """Clients of links that are not there, below a prefix of their own."""

    def __init__(self, address: str, options: Options | None = None) -> None:
        self.prefix = f"/test-{next(_numbers)}/s"
        self._config = DirectoryConfig(f"{address}{self.prefix}", options or Options(lifetime=LIFETIME))
        self._open: list[EtcdDirectory] = []

    def client(self, link: str, waits: Waits = WAITS) -> EtcdDirectory:
        self._open.append(EtcdDirectory(self._config, link=link, waits=waits))
        return self._open[-1]

    def rank(self, number: int, ranks: int = 1, *, link: str = "", host: int = 0, instance: str = "p") -> EtcdDirectory:
        """A rank that registers; its address ends in ``host``."""
        made = self.client(link or f"{instance}.{number}")
        made.register(instance, number, ranks, f"tcp://10.0.0.{host or number}:7000")
        return made

    def close(self) -> None:
        for each in self._open:
            each.close()


@pytest.fixture
def fleet(server: Etcd) -> Iterator[Fleet]:
    made = Fleet(server.address)
    yield made
    made.close()


@pytest.fixture
def fleet_of() -> Iterator[Callable[..., Fleet]]:
    """Makes fleets with clusters of their own."""
    made: list[Fleet] = []

    def make(address: str, options: Options | None = None) -> Fleet:
        made.append(Fleet(address, options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def hosts(client: EtcdDirectory, instance: str = "p") -> list[str]:
    """The last number of each address that is found."""
    return [each.address.rpartition(".")[2].partition(":")[0] for each in client.resolve(instance) or ()]


def finds(client: EtcdDirectory, *expected: str, instance: str = "p") -> None:
    until(lambda: hosts(client, instance) == list(expected), PATIENCE, f"{expected}, not {hosts(client, instance)},")


def says(client: EtcdDirectory, text: str, instance: str | None = "p") -> None:
    def look() -> bool:
        if instance is not None:
            client.resolve(instance)
        return text in client.explain(instance)[0]

    until(look, PATIENCE, f"{text!r}, not {client.explain(instance)},")


def test_an_instance_is_there_when_every_distinct_rank_is(fleet: Fleet, server: Etcd) -> None:
    asks = fleet.client("asks")
    says(asks, "nobody of this name is registered in etcd at 127.0.0.1:")
    fleet.rank(2, 3)
    first = fleet.rank(0, 3)
    says(asks, "2 of its 3 ranks are registered")
    assert hosts(asks) == []
    fleet.rank(1, 3)
    finds(asks, "0", "1", "2")
    first.close()  # it says goodbye
    says(asks, "2 of its 3 ranks are registered")
    assert len(server.keys(f"{fleet.prefix}/")) == 2


def test_names_are_anything(fleet: Fleet) -> None:
    """Also one that begins as another does, or that has separators of paths."""
    names = ("p", "p/1", "p/", "é %2F", "p" * 200)
    for number, name in enumerate(names, 1):
        fleet.rank(0, host=number, instance=name)
    asks = fleet.client("asks")
    for number, name in enumerate(names, 1):
        finds(asks, str(number), instance=name)


REGISTERS = """
import sys, time
from statelink.rendezvous import DirectoryConfig
from statelink_etcd import EtcdDirectory, Options
client = EtcdDirectory(DirectoryConfig(sys.argv[1], Options(lifetime=int(sys.argv[2]))), link="dies")
client.register("p", 0, 1, "tcp://10.0.0.7:7000")
time.sleep(600)
"""


def test_who_is_killed_expires(fleet: Fleet, server: Etcd) -> None:
    lives, asks = fleet.rank(0, instance="q"), fleet.client("asks")
    process = subprocess.Popen([sys.executable, "-c", REGISTERS, f"{server.address}{fleet.prefix}", str(LIFETIME)])
    try:
        finds(asks, "7")
    finally:
        process.kill()
        process.wait(20)
    finds(asks)
    finds(asks, "0", instance="q")
    assert lives.explain(None) == ("", "")
    assert [key for key in server.keys(f"{fleet.prefix}/") if "/p/" in key] == []


def test_a_later_process_takes_the_place_and_keeps_it(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    old, asks = fleet.rank(0, link="old", host=1), fleet.client("asks")
    finds(asks, "1")
    new = fleet.rank(0, link="new", host=2)
    finds(asks, "2")
    until(lambda: "new has taken its place" in old.explain(None)[0])
    assert "rank 0 of instance 'p' is not registered in etcd (peer old): new has taken its place" in caplog.text
    assert hosts(asks) == ["2"]
    new.close()
    finds(asks, "1")
    until(lambda: "this link is registered in etcd again" in caplog.text)


def test_ranks_must_agree_on_their_number(fleet: Fleet) -> None:
    first, asks = fleet.rank(0, 2), fleet.client("asks")
    says(asks, "1 of its 2 ranks are registered")
    other = fleet.rank(1, 4)
    until(lambda: "there are 4 ranks, another rank that there are 2" in other.explain(None)[0])
    assert hosts(asks) == []
    first.close()
    says(asks, "1 of its 4 ranks are registered")


def test_what_others_wrote_is_named_and_not_believed(fleet: Fleet, server: Etcd) -> None:
    fleet.rank(0, 2)
    asks = fleet.client("asks")
    folder = f"{fleet.prefix}/instances/p/"
    says(asks, "1 of its 2 ranks are registered")
    for wrong in (
        b"",
        b"\xff",
        b"[]",
        b'{"link": "x", "of": ' + b"[" * 20_000,
        b'{"link": "x", "address": "nowhere", "ranks": 2}',
        b'{"link": "x", "ranks": 2}',
    ):
        server.put(f"{folder}0001", wrong)
        says(asks, "the entry of rank 0001 is not one of Statelink")
        assert hosts(asks) == []
    # Of another instance: a real rank whose lease ends meanwhile would not come back beside such an entry.
    for rank, ranks in ((0, 2), (1, 3)):
        entry = f'{{"link": "x{rank}", "address": "tcp://10.0.0.9:1", "ranks": {ranks}}}'
        server.put(f"{fleet.prefix}/instances/q/000{rank}", entry.encode())
    says(asks, "disagree about their number: rank 0 that there are 2, rank 1 that there are 3", instance="q")
    server.put(f"{folder}0001", b'{"link": "x", "address": "tcp://10.0.0.9:1", "ranks": 2, "later": "field"}')
    finds(asks, "0", "9")
    server.put(f"{folder}odd", b"x")
    says(asks, "the entry of rank odd is not one of Statelink")


def test_it_is_killed_and_comes_back(tmp_path: Path, fleet_of: Callable[..., Fleet]) -> None:
    """Once with its data, and once without; what is asked for meanwhile is found after that."""
    server = Etcd(tmp_path)
    try:
        fleet = fleet_of(server.address)
        rank, asks = fleet.rank(0), fleet.client("asks")
        finds(asks, "0")
        server.kill()
        says(asks, "does not answer: the connection is refused")
        assert asks.resolve("p") is None
        assert asks.explain("p")[1] == "does etcd run, and listen there?"
        fleet.rank(0, instance="late")
        server.start()
        finds(asks, "0")
        finds(asks, "0", instance="late")
        until(lambda: rank.explain(None) == ("", ""), PATIENCE, "a rank that learns that etcd is back")

        server.members[0].stop()
        says(asks, "does not answer: it takes connections and does not answer")
        server.members[0].go_on()
        finds(asks, "0")

        server.kill()
        for each in sorted((tmp_path / "m0").rglob("*"), reverse=True):
            each.unlink() if each.is_file() else each.rmdir()
        server.start()
        assert server.keys("/") == {} or list(server.keys("/")) == [f"{fleet.prefix}/instances/p/0000"]
        finds(asks, "0")
    finally:
        server.kill()


def test_three_members_of_which_one_is_lost(
    tmp_path: Path, fleet_of: Callable[..., Fleet], caplog: pytest.LogCaptureFixture
) -> None:
    """The one that leads, and that everybody speaks to. With two lost, nobody is found until one is back."""
    server = Etcd(tmp_path, 3)
    try:
        leader = server.leader()
        server.members.sort(key=lambda member: member is not leader)  # the first is asked first
        fleet = fleet_of(server.address)
        fleet.rank(0)
        asks = fleet.client("asks")
        finds(asks, "0")
        leader.kill()
        fleet.rank(0, instance="q")  # it registers with a member that lives
        finds(asks, "0", instance="q")
        finds(asks, "0")
        other = server.leader()
        other.kill()
        says(asks, "does not answer")
        until(lambda: asks.resolve("p") is None, PATIENCE)
        server.start()
        finds(asks, "0")
        finds(asks, "0", instance="q")
    finally:
        server.kill()


def test_tls_users_and_passwords(tmp_path: Path, fleet_of: Callable[..., Fleet]) -> None:
    certificates, others = Certificates(tmp_path / "ours"), Certificates(tmp_path / "others")
    (tmp_path / "good").write_text("right\n")
    (tmp_path / "bad").write_text("wrong\n")
    for each in ("good", "bad"):
        (tmp_path / each).chmod(0o600)

    def options(
        password: str = "good", user: str = "fleet", trusted: Certificates = certificates, cert: Path | None = None
    ) -> Options:
        return Options(
            user=user,
            password_file=str(tmp_path / password) if user else "",
            ca_file=str(trusted.authority),
            cert_file=str(cert or certificates.client),
            lifetime=LIFETIME,
        )

    server = Etcd(tmp_path, certificates=certificates)
    try:
        early = fleet_of(server.address, options(user=""))
        early.rank(0)
        finds(early.client("asks"), "0")
        server.add_user("fleet", "right", "/test-")
        token = server.lock("root's")

        fleet = fleet_of(server.address, options())
        fleet.rank(0)
        asks = fleet.client("asks")
        finds(asks, "0")
        # Each change of the users makes every token out of date.
        server.ask("/v3/auth/user/add", {"name": "another", "password": "x"}, token)
        fleet.rank(0, instance="q")
        finds(asks, "0", instance="q")

        for wrong, text in (
            (options("bad"), "refuses: authentication failed, invalid user ID or password"),
            (options(trusted=others), "its certificate is not trusted"),
            (options(cert=others.client), "does not answer"),
            (options(cert=certificates.named), "refuses: CommonName of client"),
            (options(user=""), "refuses: user name is empty"),
        ):
            says(fleet_of(server.address, wrong).client("asks"), text)
        plain = fleet_of(server.address.replace("etcds", "etcd"))
        says(plain.client("asks"), "does not answer")
        elsewhere = EtcdDirectory(DirectoryConfig(f"{server.address}/elsewhere", options()), link="asks", waits=WAITS)
        try:
            says(elsewhere, "refuses: permission denied")
        finally:
            elsewhere.close()
    finally:
        server.kill()


def test_what_cannot_be_configured(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    secret.chmod(0o644)
    missing = str(tmp_path / "missing")
    cases: list[tuple[str, Options, str]] = [
        ("etcd://", Options(), "'' is not host:port"),
        ("etcd://host", Options(), "'host' is not host:port"),
        ("etcd://a:1,,b:2", Options(), "'' is not host:port"),
        ("etcd://user@a:1", Options(), "'user@a:1' is not host:port"),
        ("etcd://a:1", Options(user="u", password_file=missing), "would travel in the clear"),
        ("etcd://127.0.0.1:1,[::2]:1", Options(user="u", password_file=missing), r"\[::2\]:1 is not on loopback"),
        ("etcd://127.0.0.1:1,[::1]:1,localhost:1", Options(user="u", password_file=missing), "No such file"),
        ("etcds://a:1", Options(user="u"), "'password_file' is not configured"),
        ("etcds://a:1", Options(password_file=missing), "'user' is not configured"),
        ("etcds://a:1", Options(user="u", password_file=missing), "No such file"),
        ("etcds://a:1", Options(user="u", password_file=str(secret)), "open to others"),
        ("etcds://a:1", Options(ca_file=missing), "No such file"),
        ("etcds://a:1", Options(cert_file=str(secret)), "cert_file of etcd cannot be used"),
        ("etcds://a:1", Options(key_file=missing), "'cert_file' is not configured"),
        ("etcd://a:1", Options(ca_file=missing), "is without TLS"),
        ("etcd://a:1", Options(lifetime=0), "lifetime must be above zero"),
    ]
    for address, options, text in cases:
        with pytest.raises(ConfigError, match=text):
            EtcdDirectory.check(DirectoryConfig(address, options))

    def cluster(address: str) -> Cluster:
        return Cluster.of(DirectoryConfig(address, Options()))

    assert cluster("etcd://127.0.0.1:1,[::1]:2/a/b/").members == ("http://127.0.0.1:1", "http://[::1]:2")
    assert cluster("etcd://a:1/a/b/").prefix == "/a/b"
    assert cluster("etcd://a:1").prefix == "/statelink"


@pytest.mark.parametrize("key", ["user", "ca_file", "lifetime"])
def test_no_value_of_an_option_fails_in_other_words_than_statelinks(key: str) -> None:
    config = {"role": "decode", "backend": "tcp", "rendezvous": "etcd://127.0.0.1:1"}

    def read(value: object) -> None:
        connecting(LinkConfig.read({**config, "rendezvous_options": {key: value}}), link="x", keys=None).close()

    assert not escaped(read)


def test_who_uses_no_etcd_imports_no_http_client() -> None:
    code = "import sys, statelink_etcd; assert 'aiohttp' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_instance_that_nobody_asks_for_is_not_followed(fleet: Fleet, server: Etcd) -> None:
    fleet.rank(0)
    asks = fleet.client("asks", Waits(forget=0.5))
    until(lambda: server.watchers() == 0, PATIENCE, "the end of what other tests watched")
    for _ in range(2):
        finds(asks, "0")
        until(lambda: hosts(asks) and server.watchers() == 1, PATIENCE)
        until(lambda: server.watchers() == 0, PATIENCE)
        assert "nobody of this name" in asks.explain("p")[0]


def test_its_thread_has_no_defect(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fleet.rank(0)
        finds(fleet.client("asks"), "0")
        fleet.close()
    assert caplog.text == ""
