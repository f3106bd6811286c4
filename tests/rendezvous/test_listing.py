"""What is registered in a directory, asked of a real rendezvous server and a real etcd by an operator's command."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.helpers import peers
from tests.helpers.etcd import Etcd
from tests.helpers.links import DECODE, PREFILL, client, keys

from statelink import wire
from statelink.cli import main
from statelink.config import LinkConfig
from statelink.errors import PeerError
from statelink.rendezvous import Directory, DirectoryConfig, RendezvousServer, list_instances
from statelink_etcd import Cluster, Options, instances

Register = Callable[[str, int, int], None]
"""Registers a rank of an instance with so many ranks; its address ends in the rank."""
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in (
        "RENDEZVOUS",
        "RENDEZVOUS_OPTIONS",
        "CONFIG",
        *(each.removeprefix("STATELINK_") for each in wire.ENVIRONMENT),
    ):
        monkeypatch.delenv(f"STATELINK_{name}", raising=False)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory, etcd_program: None) -> Iterator[Etcd]:
    made = Etcd(tmp_path_factory.mktemp("etcd"))
    yield made
    made.kill()


@pytest.fixture(params=["server", "etcd"])
def directory(request: pytest.FixtureRequest) -> Iterator[tuple[str, Register]]:
    """The address of an empty directory, and how to register there."""
    clients: list[Directory] = []
    if request.param == "server":
        server = RendezvousServer()
        address = server.address
    else:
        address = f"{request.getfixturevalue('etcd').address}/list-{next(_numbers)}"

    def register(instance: str, rank: int, ranks: int) -> None:
        clients.append(client(address, f"{instance}.{rank}-of-{ranks}"))
        clients[-1].register(instance, rank, ranks, f"tcp://10.0.0.{rank}:7000")

    yield address, register
    for each in clients:
        each.close()
    if request.param == "server":
        server.close()


def listed(*arguments: str, expect: int = 0) -> Any:
    found = CliRunner().invoke(main, ["rendezvous", "--list", *arguments, "--json"])
    assert found.exit_code == expect, found.output
    return json.loads(found.stdout)


def shown(*arguments: str, expect: int = 0) -> str:
    found = CliRunner().invoke(main, ["rendezvous", "--list", *arguments])
    assert found.exit_code == expect, found.output
    assert max(map(len, found.output.splitlines())) <= 80
    return found.output


def counts(address: str) -> dict[str, tuple[int, int]]:
    config = LinkConfig(role="decode", backend="auto", rendezvous=address)
    return {each.name: (len(each.registered), each.ranks) for each in list_instances(config, keys=None)}


def test_the_page_shows_what_is_printed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "production.md").read_text()
    (block,) = re.findall(
        r"^<!-- tested by tests/rendezvous/test_listing.py -->\n```text\n(.*?)^```$", page, re.S | re.M
    )
    ranks = (("decode-0", 0, 4, 8), ("decode-0", 1, 4, 8), ("decode-0", 3, 4, 8), ("prefill-0", 0, 1, 9))
    with RendezvousServer() as server, contextlib.ExitStack() as stack:
        for instance, rank, width, host in ranks:
            made = stack.enter_context(contextlib.closing(client(server.address, f"{instance}.{rank}")))
            made.register(instance, rank, width, f"tcp://10.0.0.{host}:{7100 + rank}")
        peers.until(lambda: counts(server.address) == {"decode-0": (3, 4), "prefill-0": (1, 1)})
        printed = [line.rstrip() for line in shown(server.address, expect=1).splitlines()]
        assert printed == block.replace("tcp://10.0.0.5:7400", server.address).splitlines()


def test_every_instance_is_listed_with_the_ranks_that_are_there(directory: tuple[str, Register]) -> None:
    address, register = directory
    assert shown(address) == f"{address}: nothing is registered\n"
    assert listed(address) == {"rendezvous": address, "instances": []}
    register("p/1 é", 0, 1)
    for rank in (5, 0, 1):
        register("decode", rank, 9)
    expected = {"decode": (3, 9), "p/1 é": (1, 1)}
    peers.until(lambda: counts(address) == expected)

    found = listed(address, expect=1)
    assert [each["instance"] for each in found["instances"]] == ["decode", "p/1 é"]
    decode, other = found["instances"]
    assert (decode["complete"], decode["missing"], decode["wrong"]) == (False, [2, 3, 4, 6, 7, 8], "")
    assert decode["registered"] == [
        {"rank": rank, "address": f"tcp://10.0.0.{rank}:7000", "link": f"decode.{rank}-of-9"} for rank in (0, 1, 5)
    ]
    assert (other["complete"], other["missing"], other["present"], other["ranks"]) == (True, [], 1, 1)

    head, *lines = shown(address, expect=1).splitlines()
    assert head == f"{address}: 2 instances, 4 ranks"
    assert [line.split() for line in lines] == [
        ["instance", "present", "rank", "address"],
        ["decode", "3", "of", "9", "0", "tcp://10.0.0.0:7000"],
        ["1", "tcp://10.0.0.1:7000"],
        ["5", "tcp://10.0.0.5:7000"],
        ["-", "missing:", "2-4,", "6-8"],
        ["p/1", "é", "1", "of", "1", "0", "tcp://10.0.0.0:7000"],
    ]


def test_the_directory_of_a_link_here_is_asked(
    directory: tuple[str, Register], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    address, register = directory
    register("p", 0, 1)
    peers.until(lambda: counts(address) == {"p": (1, 1)})
    file = tmp_path / "link.toml"
    file.write_text(f'role = "prefill"\nbackend = "tcp"\nrendezvous = "{address}"\n')
    for name, value in (("STATELINK_RENDEZVOUS", address), ("STATELINK_CONFIG", str(file))):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert listed()["instances"][0]["instance"] == "p"


def test_an_instance_that_is_expected_and_not_there_is_an_error(directory: tuple[str, Register]) -> None:
    address, register = directory
    register("p", 0, 1)
    peers.until(lambda: counts(address) == {"p": (1, 1)})
    assert listed(address, "--expect", "p")["instances"][0]["complete"]
    failed = CliRunner().invoke(main, ["rendezvous", "--list", address, "--expect", "p", "--expect", "decode-0"])
    assert failed.exit_code == 1
    assert failed.stderr == "instance 'decode-0' is not registered\n"


def test_a_server_with_keys_lists_for_those_that_it_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, secret = tmp_path / "allowed", tmp_path / "secret"
    allowed.write_text(f"{PREFILL['public']}\n{DECODE['public']}\n")
    secret.write_text(DECODE["secret"])
    secret.chmod(0o600)
    options = ("--secret-file", str(secret), "--allow-file", str(allowed))
    with RendezvousServer(keys=keys(PREFILL, DECODE)) as server:
        assert listed(server.address, *options)["instances"] == []
        # Tables leave out the key of an address, which would fill a line and says nothing to a reader.
        assert shown(server.address, *options) == f"{server.address.partition('@')[0]}: nothing is registered\n"
        failed = CliRunner().invoke(main, ["rendezvous", "--list", server.address])
        assert failed.exit_code == 1
        assert "its address has a key and this link has none" in failed.output
        # For what no option gives, the environment stands in.
        with monkeypatch.context() as patch:
            patch.setenv("STATELINK_ALLOW_FILE", str(allowed))
            assert listed(server.address, *options[:2])["instances"] == []
        with monkeypatch.context() as patch:
            patch.setenv("STATELINK_SECRET_FILE", str(secret))
            assert listed(server.address, *options[2:])["instances"] == []
    with RendezvousServer(keys=keys(PREFILL, PREFILL)) as server:
        failed = CliRunner().invoke(main, ["rendezvous", "--list", server.address, *options])
        assert failed.exit_code == 1
        assert "it does not allow this link's key" in failed.output
        assert DECODE["public"] in failed.output, "what the other side has to allow"


@pytest.mark.parametrize("scheme", ["tcp", "etcd"])
def test_nobody_answers(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    failed = CliRunner().invoke(main, ["rendezvous", "--list", f"{scheme}://127.0.0.1:{port}"])
    assert failed.exit_code == 1
    assert "does not answer" in failed.output
    assert "the connection is refused: nothing listens there" in failed.output
    with pytest.raises(PeerError) as caught:
        counts(f"{scheme}://127.0.0.1:{port}")
    assert caught.value.code == "rendezvous.silent"


@pytest.mark.parametrize("scheme", ["tcp", "etcd"])
def test_an_error_is_json_too(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only a rendezvous server wants keys: half of them in the environment concerns etcd in no way."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("STATELINK_ALLOW_FILE", "absent")
    said = CliRunner().invoke(main, ["rendezvous", "--list", f"{scheme}://127.0.0.1:{port}", "--json"])
    error = json.loads(said.stdout)["error"]
    assert said.exit_code == 1
    assert error["code"] == ("config.keys" if scheme == "tcp" else "rendezvous.silent")
    assert error.keys() == {"code", "what", "who", "cause", "hint"}
    assert said.stderr.startswith(f"Error [{error['code']}]: {error['what']}")


def test_etcd_wants_a_user(tmp_path: Path, etcd_program: None, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Etcd(tmp_path)
    try:
        server.add_user("fleet", "right", "/fleet/")
        server.lock("root's")
        address = f"{server.address}/fleet"
        failed = CliRunner().invoke(main, ["rendezvous", "--list", address])
        assert failed.exit_code == 1
        assert "refuses to list: user name is empty" in failed.output
        with pytest.raises(PeerError) as caught:
            counts(address)
        assert caught.value.code == "rendezvous.refused"
        password = tmp_path / "password"
        password.write_text("right")
        password.chmod(0o600)
        monkeypatch.setenv(
            "STATELINK_RENDEZVOUS_OPTIONS", json.dumps({"user": "fleet", "password_file": str(password)})
        )
        assert listed(address)["instances"] == []
    finally:
        server.kill()


def test_what_cannot_be_meant() -> None:
    for arguments, text in (
        (["--list", "--lifetime", "3"], "--lifetime is for a server, and --list runs none"),
        (["tcp://127.0.0.1:1"], "ADDRESS goes with --list"),
        (["--expect", "p"], "--expect goes with --list"),
    ):
        failed = CliRunner().invoke(main, ["rendezvous", *arguments])
        assert failed.exit_code == 2
        assert text in failed.output


def test_entries_of_etcd_that_statelink_did_not_write_are_named(etcd: Etcd) -> None:
    prefix = f"/list-{next(_numbers)}"
    etcd.put(f"{prefix}/instances/p/0000", b'{"link": "x", "address": "tcp://10.0.0.9:1", "ranks": 2}')
    etcd.put(f"{prefix}/instances/p/0001", b'{"link": "x", "of": ' + b"[" * 20_000)
    etcd.put(f"{prefix}/instances/alone", b"")
    etcd.put(f"{prefix}/instances2/other", b"")
    alone, p = listed(f"{etcd.address}{prefix}", expect=1)["instances"]
    assert (alone["instance"], alone["registered"], alone["complete"]) == ("alone", [], False)
    assert "the entry of rank 0001 is not one of Statelink" in p["wrong"]
    assert [each["rank"] for each in p["registered"]] == [0]
    assert "rank 0001 is not one of" in " ".join(shown(f"{etcd.address}{prefix}", expect=1).split())


def test_etcd_is_asked_for_a_page_at_a_time(etcd: Etcd) -> None:
    prefix = f"/list-{next(_numbers)}"
    for rank in range(5):
        value = b'{"link": "x", "address": "tcp://10.0.0.9:1", "ranks": 5}'
        etcd.put(f"{prefix}/instances/p/{rank:04d}", value)
    cluster = Cluster.of(DirectoryConfig(f"{etcd.address}{prefix}", Options()))
    for page in (1, 2, 5, 6):
        (p,) = instances(cluster, page=page)
        assert [each.rank for each in p.registered] == [0, 1, 2, 3, 4]


def test_the_largest_page_fits_into_an_answer() -> None:
    """With names of the most characters, each of the most bytes."""
    name = "\N{MUSICAL SYMBOL G CLEF}" * 512
    page = (wire.Listed(name, 4095, 4096, name, name),) * wire.MAX_LISTED
    wire.encode(wire.Browsed(sender="x", to="y", listed=page))


def test_a_server_that_says_the_same_again_is_not_asked_for_ever() -> None:
    """Whoever has the port answers each question with the first page."""
    liar = wire.Channel(
        "liar", "tcp://127.0.0.1:0", advertise="", keys=None, insecure=False, kinds=wire.RENDEZVOUS_KINDS
    )
    page = (wire.Listed("p", 0, 1, "tcp://h:1", "p.0"),)

    def answer() -> None:
        for _ in range(2):
            ((question, _),) = itertools.islice((each for _ in iter(int, 1) for each in liar.receive(20)), 1)
            liar.send(wire.Browsed(sender="liar", to=question.sender, listed=page), None)
        liar.close()

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(PeerError, match="its answer is out of order"):
        counts(str(liar.endpoint))
    thread.join(20)
    assert not thread.is_alive()
