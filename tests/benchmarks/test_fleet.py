"""`benchmarks.fleet`: what it counts is what the directory has, and a fleet that is not whole has no result."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from benchmarks import fleet

from statelink.rendezvous import Directory, connecting

if TYPE_CHECKING:
    from statelink.config import LinkConfig


class Deviant:
    """A client that does one thing otherwise."""

    def __init__(self, client: Directory, **instead: Callable[..., Any]) -> None:
        self._client, self._instead = client, instead

    def __getattr__(self, name: str) -> Any:
        return self._instead.get(name) or getattr(self._client, name)


Deviate = Callable[[int, Directory], Any]


@pytest.fixture
def deviating(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Deviate], None]]:
    """Put something between the benchmark and its clients, by their number. All of them are closed at the end."""
    made: list[Directory] = []

    def begin(deviate: Deviate) -> None:
        def instead(config: LinkConfig, **named: Any) -> Any:
            made.append(connecting(config, **named))
            return lambda: deviate(len(made) - 1, made[-1])

        monkeypatch.setattr(fleet, "connecting", instead)
        monkeypatch.setattr(fleet, "PATIENCE", 3.0)

    yield begin
    for client in made:
        client.close()


def of(found: dict[str, Any], *names: str) -> list[Any]:
    return [found[name] for name in names]


@pytest.mark.parametrize("kind", ["server", "etcd"])
def test_every_client_is_counted_where_it_is(kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "etcd":
        request.getfixturevalue("etcd_program")
    found = fleet.measure(kind, 19, rest=0.2)
    assert of(found, "directory", "clients", "instances") == [kind, 16, 2], "only whole instances register"
    assert of(found, "registered", "found", "left") == [16, 16, 16]
    assert list(found["phases"]) == ["open", "register", "find", "rest_0.2_s", "leave"]
    assert found["phases"]["rest_0.2_s"]["seconds"] >= 0.2
    assert found["one_client"]["threads"] == 1
    assert found["one_client"]["files"] > 1


def test_the_clients_of_other_links_are_seen_by_the_clients(deviating: Callable[[Deviate], None]) -> None:
    """The benchmark asks each client once for the instance after its own."""
    asked: dict[int, set[str]] = {}

    def deviate(number: int, client: Directory) -> Any:
        def resolve(peer: str) -> Any:
            asked.setdefault(number, set()).add(peer)
            return client.resolve(peer)

        return Deviant(client, resolve=resolve)

    deviating(deviate)
    fleet.measure("server", 24, rest=0.0)
    assert asked[0] == {"i0", "i1", "i2"}, "the first one waits for all of them"
    assert [asked[number] for number in range(1, 24)] == [{f"i{(number // 8 + 1) % 3}"} for number in range(1, 24)]


def test_a_client_that_does_not_register_is_missed(deviating: Callable[[Deviate], None]) -> None:
    deviating(lambda number, client: Deviant(client, register=lambda *_: None) if number == 11 else client)
    with pytest.raises(SystemExit, match="does not keep up"):
        fleet.measure("server", 16, rest=0.0)


def test_a_wrong_address_is_noticed(deviating: Callable[[Deviate], None]) -> None:
    def deviate(number: int, client: Directory) -> Any:
        def register(instance: str, rank: int, ranks: int, address: str) -> None:
            client.register(instance, rank, ranks, "tcp://10.0.0.1:1" if number == 3 else address)

        return Deviant(client, register=register)

    deviating(deviate)
    with pytest.raises(SystemExit, match=r"client 8 found .*10\.0\.0\.1:1[^0-9].* for i0, and .*10\.0\.0\.1:1027"):
        fleet.measure("server", 16, rest=0.0)


def test_a_client_that_stays_is_noticed(deviating: Callable[[Deviate], None]) -> None:
    deviating(lambda number, client: Deviant(client, close=lambda: None) if number == 5 else client)
    with pytest.raises(SystemExit, match="does not keep up"):
        fleet.measure("server", 8, rest=0.0)


def test_a_directory_that_is_not_there_has_no_result(
    deviating: Callable[[Deviate], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def nobody() -> Iterator[tuple[str, int]]:
        yield "tcp://127.0.0.1:9", os.getpid()

    deviating(lambda number, client: client)
    monkeypatch.setattr(fleet, "server", nobody)
    with pytest.raises(SystemExit, match="does not keep up"):
        fleet.measure("server", 8, rest=0.0)


def test_processor_time_is_that_of_the_process() -> None:
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    assert fleet.processor(os.getpid()) == pytest.approx(time.process_time(), abs=0.1)


def test_state_is_that_of_this_process() -> None:
    before, done = fleet.state(), threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    with open(sys.executable, "rb"):
        during = fleet.state()
    done.set()
    thread.join()
    assert during["threads"] == before["threads"] + 1
    assert during["files"] == before["files"] + 1
    held = bytearray(64 << 20)
    assert fleet.state()["bytes"] >= before["bytes"] + len(held) // 2
