"""How decode finds prefill: the bootstrap server and the directory, over real HTTP."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import zmq
from support.bootstrap import FOR_EVER, OURS, answering, at, put, row, send, wait
from zmq.utils import z85

from statelink import Keys
from statelink_sglang.backend import (
    KEY_HEADER,
    PATH,
    PROOF_HEADER,
    SCHEMA,
    Bootstrap,
    BootstrapServer,
    Directory,
    KeyPair,
    Registrar,
    Row,
    allowed,
)

pytestmark = pytest.mark.smoke


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    server = BootstrapServer("127.0.0.1", 0, FOR_EVER)
    yield server
    server.close()


@pytest.fixture
def directory() -> Iterator[Directory]:
    directory = Directory(interval=0.02)
    yield directory
    directory.close()


def test_prefill_is_known_once_all_of_its_ranks_are(server: BootstrapServer, directory: Directory) -> None:
    where = at(server)
    put(server, row(1))
    assert directory.find(where) is None
    wait(lambda: "1 of 2 are missing" in directory.why(where))
    put(server, row(0))
    found = wait(lambda: directory.find(where))
    assert found.instances[0].addresses == ("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001")
    assert (found.dp_size, found.follow_bootstrap_room, found.http_port) == (1, True, 30000)
    assert found.instances[0].gone == ""
    assert directory.why(where) == ""


def _another(rank: int) -> Any:
    """A rank of another start, at another port, with other DP ranks."""
    return row(0, 1, f"dp-{rank}", (rank, 2))


def test_a_restarted_prefill_of_another_shape_takes_the_place_of_the_old_one(
    directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    """It may start before the old ranks have expired. Until then it is refused, which both sides say."""
    caplog.set_level("INFO", "statelink.sglang")
    with contextlib.closing(BootstrapServer("127.0.0.1", 0, lifetime=1.0)) as server:
        where = at(server)
        first = [Registrar(Bootstrap(where, KeyPair()), row(rank), period=0.2) for rank in range(2)]
        old = wait(lambda: directory.find(where))
        second = [Registrar(Bootstrap(where, KeyPair()), _another(rank), pause=0.02) for rank in range(2)]
        wait(lambda: sum("is told again: " in each.message for each in caplog.records) >= 2)
        assert directory.table[where] is old
        for each in first:
            each.close()
        new = wait(lambda: directory.table.get(where) is not old and directory.find(where))
        for each in second:
            each.close()
    assert "was started anew" in old.instances[0].gone
    assert [(each.name, each.gone) for each in new.instances] == [("dp-0", ""), ("dp-1", "")]
    said = [each.message for each in caplog.records if each.levelname == "WARNING"]
    contradiction = r"rank 0 of 1 \(DP rank \d of 2, .* contradicts rank \d of 2 .*expires 1 s after it last registered"
    for begin in (f"the bootstrap server {where} does not take", "the bootstrap server refuses what it is told"):
        assert any(each.startswith(begin) and re.search(contradiction, each) for each in said)
    assert len(said) < 40, "the same refusal is logged at its 1st, 2nd, 4th, ... occurrence"
    assert f"the bootstrap server {where} has taken rank 0 of 1 of DP rank 1" in caplog.messages


def test_a_bootstrap_server_that_was_started_anew_learns_the_ranks_by_itself(directory: Directory) -> None:
    server = BootstrapServer("127.0.0.1", 0)
    where = at(server)
    ranks = [Registrar(Bootstrap(where, KeyPair()), row(rank), period=0.05, pause=0.02) for rank in range(2)]
    before = wait(lambda: directory.find(where))
    server.close()
    wait(lambda: before.gone)
    with contextlib.closing(BootstrapServer("127.0.0.1", server.port)):
        after = wait(lambda: directory.find(where))
        assert [each.addresses for each in after.instances] == [each.addresses for each in before.instances]
        assert after.gone == ""
        for each in ranks:
            each.close()


def test_each_dp_rank_is_an_instance(server: BootstrapServer, directory: Directory) -> None:
    where = at(server)
    for number in (1, 0):
        assert directory.find(where) is None
        for rank in range(2):
            put(server, row(rank, instance=f"dp-{number}", dp=(number, 2)))
    found = wait(lambda: directory.find(where))
    assert found.dp_size == 2
    assert [each.name for each in found.instances] == ["dp-0", "dp-1"]
    assert found.instances[1].addresses == ("tcp://127.0.0.1:7010", "tcp://127.0.0.1:7011")


def test_a_dp_rank_that_opens_its_links_anew_leaves_the_others(server: BootstrapServer, directory: Directory) -> None:
    where = at(server)
    for number in range(2):
        put(server, row(0, 1, f"dp-{number}", (number, 2)))
    before = wait(lambda: directory.find(where))
    put(server, row(0, 1, "dp-1", (1, 2), address="tcp://127.0.0.1:7999"))
    after = wait(lambda: directory.table[where] is not before and directory.table[where])
    assert after.instances[0] is before.instances[0]
    assert (before.instances[0].gone, after.instances[1].gone) == ("", "")
    assert "has opened its links anew" in before.instances[1].gone


FORGED = {
    "other DP ranks": row(0, 1, "evil", (0, 3)),
    "more ranks": row(2, 3),
    "another start": row(0, 2, "evil"),
    "another start's second rank": row(1, 2, "evil"),
    "another address": row(1, address="tcp://6.6.6.6:1"),
    "the same row": row(1),
    "a rank without place": row(0, dp=(1, 2)),
}


@pytest.mark.parametrize("kind", FORGED)
def test_what_contradicts_a_registered_rank_is_refused(
    server: BootstrapServer, directory: Directory, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    where, forger = at(server), KeyPair()
    for rank in range(2):
        put(server, row(rank))
    before = wait(lambda: directory.find(where))
    for _ in range(8):
        with pytest.raises(ValueError, match=r"answered 409: rank .* contradicts rank .*, which is registered"):
            put(server, FORGED[kind], forger)
    wait(lambda: sum("(8 times like this)" in each for each in caplog.messages))
    assert len([each for each in caplog.messages if "times like this" in each]) == 4
    # Who has no proof is told nothing but how to give one.
    for headers in ({}, {KEY_HEADER: OURS.public, PROOF_HEADER: "0" * 64}):
        status, answer = send(server, "PUT", PATH, json.dumps(FORGED[kind]._asdict()).encode(), **headers)
        assert (status, b"proof" in answer) == (401, True)
    for rank in range(2):
        put(server, row(rank))  # the honest ranks go on
    found = Directory(interval=0.02)
    assert [each.addresses for each in wait(lambda: found.find(where)).instances] == [before.instances[0].addresses]
    found.close()
    assert (directory.table[where], before.gone) == (before, "")


@pytest.mark.parametrize("given", [row(1, instance="second"), row(1, 3)])
def test_ranks_of_another_start_do_not_complete_one(server: BootstrapServer, directory: Directory, given: Row) -> None:
    put(server, row(0))
    with pytest.raises(ValueError, match="contradicts"):
        put(server, given)
    directory.find(at(server))
    wait(lambda: "1 of 2 are missing" in directory.why(at(server)))


class Fleet(NamedTuple):
    """The keys of processes: prefill's, decode's, and those of a process that nobody allows."""

    prefill: Keys
    decode: Keys
    stranger: Keys


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Prefill and decode allow each other. Prefill's keys are in the environment, as for its bootstrap server."""
    (prefill, one), (decode, two), (_, three) = (tuple(map(bytes.decode, zmq.curve_keypair())) for _ in range(3))
    monkeypatch.setenv("STATELINK_SECRET", one)
    monkeypatch.setenv("STATELINK_ALLOW", decode)
    return Fleet(Keys(secret=one, allow=(decode,)), Keys(secret=two, allow=(prefill,)), Keys(secret=three))


def _keyed(rank: int, keys: Keys, **more: Any) -> Any:
    """The row of a rank whose link has keys."""
    key = base64.urlsafe_b64encode(z85.decode(keys.public)).decode().rstrip("=")
    return row(rank, address=f"tcp://127.0.0.1:{7000 + rank}@{key}", **more)


def test_with_keys_only_their_holders_register(fleet: Fleet) -> None:
    """Also before an honest rank has: forged rows come first here."""
    with contextlib.closing(BootstrapServer("127.0.0.1", 0, FOR_EVER)) as server:
        where, ours, theirs = at(server), KeyPair(fleet.prefill), KeyPair(fleet.stranger)
        for given in (_keyed(0, fleet.stranger), _keyed(0, fleet.prefill, instance="evil"), row(0)):
            with pytest.raises(ValueError, match=r"answered 403: the key .* is neither this server's own nor"):
                put(server, given, theirs)
        bare = json.dumps(_keyed(0, fleet.prefill)._asdict()).encode()
        assert send(server, "PUT", PATH, bare, **{KEY_HEADER: ours.public, PROOF_HEADER: "0" * 64})[0] == 401
        for given in (row(0), _keyed(0, fleet.decode), row(0, address="tcp://127.0.0.1:1@no-key")):
            with pytest.raises(ValueError, match=r"answered 40[03]: .*key"):
                put(server, given, ours)
        for rank in range(2):
            put(server, _keyed(rank, fleet.prefill), ours)
        with contextlib.closing(Directory(0.02, allowed(fleet.decode))) as directory:
            found = wait(lambda: directory.find(where))
        assert [each.name for each in found.instances] == ["first"]


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        (True, False, "has keys, and this server's link has none"),
        (False, True, "has no keys, and this server's link has some"),
        (True, True, "which this server does not allow"),
    ],
)
def test_decode_takes_no_ranks_with_which_its_link_would_not_speak(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, prefill: bool, decode: bool, said: str
) -> None:
    if not prefill:
        monkeypatch.delenv("STATELINK_SECRET")
        monkeypatch.delenv("STATELINK_ALLOW")
    with (
        contextlib.closing(BootstrapServer("127.0.0.1", 0, FOR_EVER)) as server,
        contextlib.closing(Directory(0.02, allowed(fleet.stranger) if decode else None)) as directory,
    ):
        for rank in range(2):
            put(server, *((_keyed(rank, fleet.prefill), KeyPair(fleet.prefill)) if prefill else (row(rank),)))
        directory.find(at(server))
        assert said in wait(lambda: directory.why(at(server)))
        assert not directory.table


def test_a_prefill_that_answers_no_more_is_gone(server: BootstrapServer, directory: Directory) -> None:
    where = at(server)
    put(server, row(0, 1))
    found = wait(lambda: directory.find(where))
    server.close()
    wait(lambda: found.instances[0].gone)
    assert "does not answer" in found.instances[0].gone
    assert where not in directory.table


NAMED = b'{"schema": %d, "http_port": 1, "follows": true, "instances": [{"instance": "a", "addresses": %%s}]}' % SCHEMA
NESTED = b"[" * 900 + b"]" * 900
"""Python reads it, and cannot write it everywhere."""


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "HTTP status 404"),
        ({"schema": "x" * 60_000}, "version xxx"),
        ({"schema": SCHEMA + 1}, f"version {SCHEMA + 1} of its answers, not {SCHEMA}"),
        ({"schema": SCHEMA, "instances": []}, "an answer of another kind"),
        ({"schema": SCHEMA, "http_port": 1, "follows": True, "instances": []}, "an answer without ranks"),
        ({"schema": SCHEMA, "http_port": 1, "follows": True, "instances": [7]}, "an answer of another kind"),
        ({"schema": SCHEMA, "http_port": 1, "follows": True, "instances": [{"instance": "a"}]}, "of another kind"),
        (NAMED % b'"7001"', "an answer of another kind"),
        (NAMED % b"[7001]", "an answer of another kind"),
        (NAMED % b"[]", "an answer without ranks"),
        (b'{"schema": %d, "http_port": 1e400, "follows": true, "instances": []}' % SCHEMA, "an answer of another kind"),
        (b'{"schema": NaN, "instances": []}', "version NaN of its answers"),
        (b'{"schema": %s}' % NESTED, "of its answers"),
        (b'{"schema": "\\ud800"}', "version \\ud800 of its answers"),
        ([], "an answer of another kind"),
        (b"[" * 60_000, "an answer of another kind"),
    ],
)
def test_another_server_at_the_port_is_named(
    directory: Directory, answer: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    with answering(lambda *asked: (404 if answer is None else 200, body)) as at:
        directory.find(at)
        wait(lambda: "--disaggregation-transfer-backend statelink" in directory.why(at))
        assert said in directory.why(at)
        assert len(directory.why(at)) < 500
        assert not [each for each in caplog.records if each.levelname == "ERROR"]


@pytest.fixture
def slow() -> Iterator[tuple[int, list[socket.socket]]]:
    """A port at which connections are accepted, on every address of this machine. A test may send on them."""
    accepted: list[socket.socket] = []
    with socket.create_server(("", 0), backlog=512) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(listener.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1], accepted
        listener.shutdown(socket.SHUT_RDWR)
    for each in accepted:
        each.close()


def test_a_server_that_answers_byte_by_byte_does_not_hold_a_question(
    directory: Directory, slow: tuple[int, list[socket.socket]]
) -> None:
    """A request may name any server. If it held a question for ever, a few requests would end all questions."""
    port, accepted = slow
    at = f"127.0.0.1:{port}"
    directory.find(at)

    def drip() -> str:
        for each in accepted:
            with contextlib.suppress(OSError):
                each.send(b"H")
        return directory.why(at)

    wait(drip)
    directory.close()


def test_many_servers_that_do_not_answer_do_not_keep_another_from_being_found(
    server: BootstrapServer, slow: tuple[int, list[socket.socket]]
) -> None:
    put(server, row(0, 1))
    with contextlib.closing(Directory(interval=0.02)) as directory:
        for number in range(200):
            directory.find(f"127.0.1.{number + 1}:{slow[0]}")
        wait(lambda: len(slow[1]) > 5)
        wait(lambda: directory.find(at(server)))


def test_what_is_known_of_a_server_that_never_answers_is_forgotten(directory: Directory) -> None:
    """Each request may name another one."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        at = f"127.0.0.1:{closed.getsockname()[1]}"
        directory.find(at)
        wait(lambda: directory.why(at))
        wait(lambda: not directory.why(at))


@pytest.mark.parametrize(
    "at", ["a:b", "[::1:80", "a b:1", "a\0b:1", ".:1", "x" * 70 + ":1", "\ud800:1", "127.0.0.1:999999"]
)
def test_an_address_that_is_none_is_a_reason(directory: Directory, at: str, caplog: pytest.LogCaptureFixture) -> None:
    directory.find(at)
    wait(lambda: directory.why(at))
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


WRONG = [
    row(2, 2),
    row(0, schema=SCHEMA + 1),
    row(0, dp=(2, 2)),
    row(0, http_port=True),
    row(0, ranks="2"),
    row(0, instance="x" * 513),
    row(0, address="x" * 513),
    row(0, ranks=4096, dp=(0, 2)),
]


WRONG_BODIES = [
    *(json.dumps(each._asdict()).encode() for each in WRONG),
    b"{}",
    json.dumps({**row(0)._asdict(), "more": 1}).encode(),
    *(json.dumps(row(0)._asdict()).encode().replace(b"30000", number) for number in (b"1e400", b"NaN", b"9" * 5000)),
    json.dumps(row(0)._asdict()).encode().replace(b'"first"', NESTED),
    b"[" * 60_000,
    b"{",
    b"\xff\xfe",
]


def test_a_wrong_row_is_refused_and_the_server_lives(server: BootstrapServer, caplog: pytest.LogCaptureFixture) -> None:
    for body in WRONG_BODIES:
        status, answer = send(server, "PUT", PATH, body)
        assert (status, bool(json.loads(answer)["error"])) == (400, True), body
    put(server, row(0, 1))
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def test_many_ranks_with_long_addresses_are_found(server: BootstrapServer, directory: Directory) -> None:
    """Their answer is longer than a row may be."""
    ranks = 200
    for rank in range(ranks):
        put(server, row(rank, ranks, address=f"tcp://{'x' * 400}:{rank}"))
    found = wait(lambda: directory.find(at(server)))
    assert len(found.instances[0].addresses) == ranks


def test_probes_that_reset_their_connections_leave_no_trace_in_the_log(
    server: BootstrapServer, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    printed: list[str] = []

    def ended() -> bool:
        printed.append(capfd.readouterr().err)
        return any(printed) or sum("a connection from" in each.message for each in caplog.records) == 5

    caplog.set_level("DEBUG", "statelink.sglang")
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.port)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    put(server, row(0, 1))
    wait(ended)
    assert not "".join(printed)
    assert {each.levelname for each in caplog.records} == {"DEBUG"}


def test_a_body_of_another_length_is_refused(server: BootstrapServer) -> None:
    for length in ("-5", "abc", str(1 << 30)):
        assert send(server, "PUT", PATH, b"{}", Content_Length=length)[0] == 400


def test_a_port_in_use_is_said_with_the_option_to_change(server: BootstrapServer) -> None:
    with pytest.raises(OSError, match="choose another --disaggregation-bootstrap-port"):
        BootstrapServer("127.0.0.1", server.port)
