"""How decode finds prefill: the bootstrap server and the directory, over real HTTP."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from statelink_sglang import _directory
from statelink_sglang._directory import Directory
from statelink_sglang._http import put
from statelink_sglang._server import PATH, SCHEMA, BootstrapServer

pytestmark = pytest.mark.smoke


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    server = BootstrapServer("127.0.0.1", 0)
    yield server
    server.close()


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Directory]:
    monkeypatch.setattr(_directory, "INTERVAL", 0.02)
    directory = Directory()
    yield directory
    directory.close()


def _row(rank: int, ranks: int = 2, instance: str = "first", **more: Any) -> dict[str, Any]:
    address = f"tcp://127.0.0.1:{7000 + rank}"
    return {"schema": SCHEMA, "instance": instance, "rank": rank, "ranks": ranks, "address": address, **more}


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
    assert found.addresses == ("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001")
    assert (found.dp_size, found.follow_bootstrap_room, found.gone) == (1, True, "")
    assert directory.why(at) == ""


def test_a_prefill_that_was_started_anew_replaces_the_old_one(server: BootstrapServer, directory: Directory) -> None:
    at = _at(server)
    put(at, _row(0, 1), 5)
    old = _wait(lambda: directory.find(at))
    put(at, _row(0, 1, "second"), 5)
    new = _wait(lambda: directory.table[at] is not old and directory.table[at])
    assert "was started anew" in old.gone
    assert (new.instance, new.gone) == ("second", "")


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
    _wait(lambda: found.gone)
    assert "does not answer" in found.gone
    assert at not in directory.table


def test_another_server_at_the_port_is_named(directory: Directory) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, format: str, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        at = f"127.0.0.1:{other.server_port}"
        directory.find(at)
        _wait(lambda: "--disaggregation-transfer-backend statelink" in directory.why(at))
        other.shutdown()


@pytest.mark.parametrize(
    "row",
    [
        {},
        _row(2, 2),
        _row(0, schema=SCHEMA + 1),
        {**_row(0), "ranks": "2"},
        _row(0, more=1),
    ],
)
def test_a_wrong_row_is_refused_and_the_server_lives(server: BootstrapServer, row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="answered 400"):
        put(_at(server), row, 5)
    put(_at(server), _row(0, 1), 5)


def test_a_body_that_is_no_json_or_too_long_is_refused(server: BootstrapServer) -> None:
    for body, length in ((b"{", "1"), (b"{}", str(1 << 30))):
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
