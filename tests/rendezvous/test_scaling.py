"""A fleet grows, shrinks and changes who sends to whom while rooms flow, in processes that a directory introduces."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.helpers.engine import Engine, LinkHandle, RoomHandle
from tests.helpers.etcd import Etcd
from tests.helpers.pools import Kv
from tests.helpers.worker import Host

from statelink import Status
from statelink.config import LinkConfig
from statelink.rendezvous import RendezvousServer, list_instances

if TYPE_CHECKING:
    from pathlib import Path

    from statelink.errors import Reason

POOLS = (Kv(layers=(0, 1)),)
SENT, FILLED = range(24), range(24, 48)
"""Pages that a member only sends, and pages that it only receives into."""
PAGES, TOKENS = 4, 64
"""Of a room."""
AT_ONCE = 2
"""Rooms of one route that are open at a time."""
PATIENCE = 60.0
_rooms, _prefixes = itertools.count(1), itertools.count()
Route = tuple["Member", "Member"]


@pytest.fixture(params=["server", "etcd"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What links are configured with."""
    if request.param == "server":
        with RendezvousServer(lifetime=2.0) as made:
            yield {"rendezvous": made.address}
        return
    request.getfixturevalue("etcd_program")
    server = Etcd(tmp_path_factory.mktemp("etcd"))
    yield {"rendezvous": f"{server.address}/scaling-{next(_prefixes)}", "rendezvous_options": {"lifetime": 2}}
    server.kill()


@dataclass(eq=False)
class Member:
    """An instance of one rank, in a process of its own, over a link of the role ``both``.

    Attributes:
        free: Pages that no open room fills.
    """

    name: str
    engine: Engine
    link: LinkHandle
    free: list[int] = field(default_factory=lambda: list(FILLED))

    def bytes_of(self, pages: list[int]) -> bytes:
        """What lies in pages, seen through the test's own mapping."""
        return b"".join(array[pages].tobytes() for array in self.link.memory.arrays["kv"].values())


@dataclass
class Flight:
    """A room between two members, and the pages of both."""

    source: Member
    target: Member
    here: list[int]
    there: list[int]
    receiving: RoomHandle
    sending: RoomHandle


class Fleet:
    """Members, and rooms that flow along routes between them.

    Attributes:
        routes: Who sends to whom from now on. Rooms of earlier routes go on.
        succeeded: Rooms that ended well, by the names of both members.
        failed: Why others failed, by the same.
    """

    def __init__(self, folder: Path, directory: Mapping[str, Any], names: str) -> None:
        self._directory = dict(directory)
        # Processes take a while to start; an instance is there once its link is open.
        self.engines = {name: Engine(folder, name) for name in names}
        self.members: dict[str, Member] = {}
        self.routes: list[Route] = []
        self.flying: list[Flight] = []
        self.succeeded: Counter[str] = Counter()
        self.failed: dict[str, list[Reason]] = {}
        self._rng = np.random.default_rng(5)

    def add(self, name: str) -> Member:
        """Open an instance's link, while rooms between the others flow."""
        config = {**self._directory, "role": "both", "instance": name, "inspect": False}
        opened = self.engines[name].begin_open(backend="tcp", pools=POOLS, **config)
        self.flow(3)
        self.members[name] = Member(name, self.engines[name], opened())
        return self.members[name]

    def follow(self, *routes: str) -> None:
        """From now on, rooms flow so: ``ab`` is from ``a`` to ``b``."""
        self.routes = [(self.members[route[0]], self.members[route[1]]) for route in routes]

    def begin(self, source: Member, target: Member, pushed: int = TOKENS) -> Flight:
        """Open a room on both sides, and push so many of its tokens."""
        room, here = next(_rooms), self._rng.permutation(SENT)[:PAGES].tolist()
        there, target.free = target.free[:PAGES], target.free[PAGES:]
        receiving = target.link.receive(room, source.name, TOKENS, {"kv": there}, deadline=PATIENCE)
        sending = source.link.send(room, TOKENS, deadline=PATIENCE)
        sending.push({"kv": here[: pushed * PAGES // TOKENS]}, span=(0, pushed))
        self.flying.append(Flight(source, target, here, there, receiving, sending))
        return self.flying[-1]

    def step(self) -> None:
        """Open rooms where fewer than should are open, and look at those that are."""
        for source, target in self.routes:
            flying = sum((each.source, each.target) == (source, target) for each in self.flying)
            for _ in range(AT_ONCE - flying):
                self.begin(source, target)
        left = [each for each in self.flying if not self._ended(each)]
        if len(left) == len(self.flying):
            time.sleep(0.002)  # the members need the processors
        self.flying = left

    def _ended(self, flight: Flight) -> bool:
        seen, gone = flight.receiving.see(), flight.source.name not in self.members
        if not seen.quiesced or not (gone or flight.sending.see().quiesced):
            return False
        route = flight.source.name + flight.target.name
        if seen.status is Status.SUCCEEDED:
            assert flight.target.bytes_of(flight.there) == flight.source.bytes_of(flight.here)
            self.succeeded[route] += 1
        else:
            assert seen.reason is not None
            self.failed.setdefault(route, []).append(seen.reason)
        flight.target.free += flight.there
        return True

    def flow(self, rooms: int) -> None:
        """Until so many more rooms of every route have succeeded."""
        wanted = {source.name + target.name: rooms for source, target in self.routes}
        before, end = self.succeeded.copy(), time.monotonic() + PATIENCE
        while any(self.succeeded[route] - before[route] < count for route, count in wanted.items()):
            assert time.monotonic() < end, (self.succeeded - before, self.failed)
            self.step()

    def land(self) -> None:
        """Until no room is open."""
        self.routes = []
        self.go_on(lambda: not self.flying)

    def go_on(self, done: Callable[[], bool]) -> None:
        """Let rooms flow until something is so, and look for it now and then."""
        end = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < end, (self.flying, self.failed)
            for _ in range(5):
                self.step()

    def registered(self) -> list[str]:
        """The instances that the directory knows."""
        config = LinkConfig.read({"role": "decode", "backend": "tcp", **self._directory})
        return [each.name for each in list_instances(config, keys=None) if each.complete]

    def close(self) -> None:
        for engine in self.engines.values():
            engine.dismiss()
        for engine in self.engines.values():
            engine.leave()


@pytest.fixture
def fleet(tmp_path: Path, directory: dict[str, Any]) -> Iterator[Fleet]:
    made = Fleet(tmp_path, directory, "abcd")
    yield made
    made.close()


def test_instances_come_go_and_change_roles_while_rooms_flow(fleet: Fleet) -> None:
    """Only rooms of the instance that is killed fail, and no process is started again."""
    for name in "abc":
        fleet.add(name)
    fleet.follow("ac", "bc")
    fleet.flow(10)

    fleet.add("d")
    fleet.follow("ac", "bc", "ad", "bd")
    fleet.flow(10)

    # Who received sends, and who sent receives. Rooms that are open go on.
    fleet.follow("ca", "ba", "cd", "bc")
    fleet.flow(10)
    fleet.go_on(lambda: fleet.registered() == ["a", "b", "c", "d"])

    # One is killed in the middle of a room.
    half = fleet.begin(fleet.members["b"], fleet.members["a"], pushed=TOKENS // 2)
    half.sending.reach(Status.TRANSFERRING)
    fleet.members.pop("b").engine.kill()
    fleet.follow("ca", "cd", "ad")
    fleet.flow(10)
    fleet.go_on(lambda: not any(each.source.name == "b" for each in fleet.flying))
    fleet.go_on(lambda: fleet.registered() == ["a", "c", "d"])

    # One drains and closes.
    fleet.follow("ca", "ac")
    fleet.go_on(lambda: not any(each.target.name == "d" for each in fleet.flying))
    assert fleet.members.pop("d").link.close()
    fleet.go_on(lambda: fleet.registered() == ["a", "c"])
    fleet.flow(10)
    fleet.land()

    assert {route[0] for route in fleet.failed} == {"b"}, fleet.failed
    assert {reason.code for reasons in fleet.failed.values() for reason in reasons} == {"peer.lost"}
    for name in "acd":
        assert fleet.engines[name].alive
        assert fleet.engines[name](Host.take_errors) == []
    for member in fleet.members.values():
        seen = member.link.snapshot()
        assert (seen["quarantined"], seen["taken_back"]) == ([], []), seen
