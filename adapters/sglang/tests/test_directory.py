"""How decode finds prefill: the bootstrap server and the directory, over real HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from statelink_sglang.backend import PATH, SCHEMA, BootstrapServer, Directory, put

pytestmark = pytest.mark.smoke


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    server = BootstrapServer("127.0.0.1", 0)
    yield server
    server.close()


@pytest.fixture
def directory() -> Iterator[Directory]:
    directory = Directory(interval=0.02)
    yield directory
    directory.close()


def _row(
    rank: int, ranks: int = 2, instance: str = "first", dp: tuple[int, int] = (0, 1), **more: Any
) -> dict[str, Any]:
    place = {"rank": rank, "ranks": ranks, "dp_rank": dp[0], "dp_size": dp[1]}
    address = f"tcp://127.0.0.1:{7000 + 10 * dp[0] + rank}"
    own = {"address": address, "follows": True, "http_port": 30000}
    return {"schema": SCHEMA, "instance": instance, **place, **own, **more}


def _wait(condition: Callable[[], Any]) -> Any:
    until = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


def _at(server: BootstrapServer) -> str:
    return f"127.0.0.1:{server.port}"


def test_prefill_is_known_once_all_of_its_ranks_are(server: BootstrapServer, directory: Directory) -> None:
    at = _at(server)
    put(at, _row(1), 5)
    assert directory.find(at) is None
    _wait(lambda: "1 of 2 are missing" in directory.why(at))
    put(at, _row(0), 5)
    found = _wait(lambda: directory.find(at))
    assert found.instances[0].addresses == ("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001")
    assert (found.dp_size, found.follow_bootstrap_room, found.http_port) == (1, True, 30000)
    assert found.instances[0].gone == ""
    assert directory.why(at) == ""


def test_a_prefill_that_was_started_anew_replaces_the_old_one(server: BootstrapServer, directory: Directory) -> None:
    at = _at(server)
    put(at, _row(0, 1), 5)
    old = _wait(lambda: directory.find(at))
    put(at, _row(0, 1, "second"), 5)
    new = _wait(lambda: directory.table[at] is not old and directory.table[at])
    assert "was started anew" in old.instances[0].gone
    assert (new.instances[0].name, new.instances[0].gone) == ("second", "")


def test_each_dp_rank_is_an_instance(server: BootstrapServer, directory: Directory) -> None:
    at = _at(server)
    for number in (1, 0):
        assert directory.find(at) is None
        for rank in range(2):
            put(at, _row(rank, instance=f"dp-{number}", dp=(number, 2)), 5)
    found = _wait(lambda: directory.find(at))
    assert found.dp_size == 2
    assert [each.name for each in found.instances] == ["dp-0", "dp-1"]
    assert found.instances[1].addresses == ("tcp://127.0.0.1:7010", "tcp://127.0.0.1:7011")


def test_a_dp_rank_that_opens_its_links_anew_leaves_the_others(server: BootstrapServer, directory: Directory) -> None:
    at = _at(server)
    for number in range(2):
        put(at, _row(0, 1, f"dp-{number}", (number, 2)), 5)
    before = _wait(lambda: directory.find(at))
    put(at, _row(0, 1, "dp-1", (1, 2), address="tcp://127.0.0.1:7999"), 5)
    after = _wait(lambda: directory.table[at] is not before and directory.table[at])
    assert after.instances[0] is before.instances[0]
    assert (before.instances[0].gone, after.instances[1].gone) == ("", "")
    assert "has opened its links anew" in before.instances[1].gone


def test_a_server_with_other_dp_ranks_replaces_the_old_one(server: BootstrapServer, directory: Directory) -> None:
    at = _at(server)
    for number in range(2):
        put(at, _row(0, 1, f"dp-{number}", (number, 2)), 5)
    put(at, _row(0, 1, "alone"), 5)
    directory.find(at)
    assert [each.name for each in _wait(lambda: directory.find(at)).instances] == ["alone"]


def test_ranks_of_an_old_start_do_not_complete_a_new_one(server: BootstrapServer, directory: Directory) -> None:
    at = _at(server)
    put(at, _row(0), 5)
    put(at, _row(1, instance="second"), 5)
    directory.find(at)
    _wait(lambda: "1 of 2 are missing" in directory.why(at))


def test_a_prefill_that_answers_no_more_is_gone(server: BootstrapServer, directory: Directory) -> None:
    at = _at(server)
    put(at, _row(0, 1), 5)
    found = _wait(lambda: directory.find(at))
    server.close()
    _wait(lambda: found.instances[0].gone)
    assert "does not answer" in found.instances[0].gone
    assert at not in directory.table


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "HTTP status 404"),
        ({"schema": "x" * 60_000}, "version 'xxx"),
        ({"schema": SCHEMA + 1}, f"version {SCHEMA + 1} of its answers, not {SCHEMA}"),
        ({"schema": SCHEMA, "instances": []}, "an answer of another kind"),
        ({"schema": SCHEMA, "http_port": 1, "follows": True, "instances": []}, "an answer without ranks"),
        ({"schema": SCHEMA, "http_port": 1, "instances": [7]}, "an answer of another kind"),
        ({"schema": SCHEMA, "http_port": float("inf"), "instances": []}, "an answer of another kind"),
        ([], "an answer of another kind"),
        (b"[" * 60_000, "an answer of another kind"),
    ],
)
def test_another_server_at_the_port_is_named(directory: Directory, answer: Any, said: str) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if answer is None:
                self.send_error(404)
                return
            body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        at = f"127.0.0.1:{other.server_port}"
        directory.find(at)
        _wait(lambda: "--disaggregation-transfer-backend statelink" in directory.why(at))
        assert said in directory.why(at)
        assert len(directory.why(at)) < 500
        other.shutdown()


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

    _wait(drip)
    directory.close()


def test_many_servers_that_do_not_answer_do_not_keep_another_from_being_found(
    server: BootstrapServer, slow: tuple[int, list[socket.socket]]
) -> None:
    put(_at(server), _row(0, 1), 5)
    with contextlib.closing(Directory(interval=0.02)) as directory:
        for number in range(200):
            directory.find(f"127.0.1.{number + 1}:{slow[0]}")
        _wait(lambda: len(slow[1]) > 5)
        _wait(lambda: directory.find(_at(server)))


def test_what_is_known_of_a_server_that_never_answers_is_forgotten(directory: Directory) -> None:
    """Each request may name another one."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        at = f"127.0.0.1:{closed.getsockname()[1]}"
        directory.find(at)
        _wait(lambda: directory.why(at))
        _wait(lambda: not directory.why(at))


@pytest.mark.parametrize(
    "at", ["a:b", "[::1:80", "a b:1", "a\0b:1", ".:1", "x" * 70 + ":1", "\ud800:1", "127.0.0.1:999999"]
)
def test_an_address_that_is_none_is_a_reason(directory: Directory, at: str, caplog: pytest.LogCaptureFixture) -> None:
    directory.find(at)
    _wait(lambda: directory.why(at))
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


@pytest.mark.parametrize(
    "row",
    [
        {},
        _row(2, 2),
        _row(0, schema=SCHEMA + 1),
        _row(0, dp=(2, 2)),
        {**_row(0), "http_port": True},
        {**_row(0), "ranks": "2"},
        _row(0, instance="x" * 513),
        {**_row(0), "address": "x" * 513},
        _row(0, ranks=4096, dp=(0, 2)),
        _row(0, more=1),
    ],
)
def test_a_wrong_row_is_refused_and_the_server_lives(server: BootstrapServer, row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="answered 400"):
        put(_at(server), row, 5)
    put(_at(server), _row(0, 1), 5)


def test_many_ranks_with_long_addresses_are_found(server: BootstrapServer, directory: Directory) -> None:
    """Their answer is longer than a row may be."""
    ranks = 200
    for rank in range(ranks):
        put(_at(server), {**_row(rank, ranks), "address": f"tcp://{'x' * 400}:{rank}"}, 5)
    found = _wait(lambda: directory.find(_at(server)))
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
    put(_at(server), _row(0, 1), 5)
    _wait(ended)
    assert not "".join(printed)
    assert {each.levelname for each in caplog.records} == {"DEBUG"}


def test_a_body_that_is_no_json_or_too_long_is_refused(server: BootstrapServer) -> None:
    deep = b"[" * 60_000
    for body, length in ((b"{", "1"), (b"{}", str(1 << 30)), (deep, str(len(deep)))):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
        connection.putrequest("PUT", PATH)
        connection.putheader("Content-Length", length)
        connection.endheaders(body)
        answer = connection.getresponse()
        assert answer.status == 400
        assert json.loads(answer.read())["error"]
        connection.close()


def test_a_port_in_use_is_said_with_the_option_to_change(server: BootstrapServer) -> None:
    with pytest.raises(OSError, match="choose another --disaggregation-bootstrap-port"):
        BootstrapServer("127.0.0.1", server.port)
