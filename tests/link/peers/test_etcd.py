"""Links in processes of their own that find each other through etcd, which may die."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.etcd import Etcd
from tests.helpers.pair import Pair
from tests.helpers.peers import until
from tests.helpers.pools import Aux, Kv

if TYPE_CHECKING:
    from tests.helpers.engine import LinkHandle
    from tests.link.conftest import TwoEngines

pytestmark = [
    pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session"),
    pytest.mark.usefixtures("etcd_program"),
]

_rooms = itertools.count(80_000)
_prefixes = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    made = Etcd(tmp_path_factory.mktemp("etcd"))
    yield made
    made.kill()


@pytest.fixture
def directory(server: Etcd) -> dict[str, Any]:
    """What links are configured with."""
    return {"rendezvous": f"{server.address}/links-{next(_prefixes)}", "rendezvous_options": {"lifetime": 2}}


class Named(Pair):
    """A pair whose decode knows prefill by its instance's name."""

    def receive(self, case: Any, **named: Any) -> Any:
        return self.decode.receive(case.room, "prefill", case.tokens, case.target, prefix=case.prefix, **named)


def entries(server: Etcd, directory: dict[str, Any]) -> list[str]:
    """Instances and ranks that are registered."""
    prefix = "/" + directory["rendezvous"].rpartition("/")[2] + "/instances/"
    return [key.removeprefix(prefix) for key in server.keys(prefix)]


def test_its_death_hurts_no_pair_and_links_come_back_to_it(
    two_engines: TwoEngines, server: Etcd, directory: dict[str, Any]
) -> None:
    prefill, decode = (two_engines.open(role, **directory) for role in ("prefill", "decode"))
    pair = Named(prefill, decode)
    pair.run()
    assert entries(server, directory) == ["decode/0000", "prefill/0000"]

    server.kill()
    for _ in range(5):
        pair.run()
    late = two_engines.open("decode", **directory)
    text = late.receive(next(_rooms), "prefill", 64, deadline=1.0).failed(10)
    assert "prefill instance prefill is still resolving; etcd at 127.0.0.1:" in text
    assert "does not answer: the connection is refused" in text
    pair.run()

    server.start()
    Named(prefill, late).run()
    pair.run()
    late.close()
    prefill.close()
    decode.close()
    assert entries(server, directory) == []


def test_not_before_every_rank_is_there(two_engines: TwoEngines, directory: dict[str, Any]) -> None:
    """Two ranks on each side; those of decode find each other in the same way."""
    pools = (Kv(replicated=True), Aux())

    def rank(role: str, number: int) -> LinkHandle:
        return two_engines.open(role, pools, instance=role, rank=number, ranks=2, **directory)

    rank("prefill", 0)
    decodes = [rank("decode", 0), rank("decode", 1)]
    rooms = [each.receive(next(_rooms), "prefill", 64, deadline=30) for each in decodes]
    text = decodes[0].receive(next(_rooms), "prefill", 64, deadline=1.0).failed(10)
    assert "1 of its 2 ranks are registered in etcd" in text
    rank("prefill", 1)
    until(lambda: all(each.snapshot()["peers"]["prefill"] == "ready" for each in decodes))
    for room in rooms:
        room.abort()


def test_who_is_killed_expires(two_engines: TwoEngines, server: Etcd, directory: dict[str, Any]) -> None:
    engine = two_engines.engine()
    two_engines.open("prefill", engine=engine, **directory)
    until(lambda: entries(server, directory) == ["prefill/0000"])
    engine.kill()
    until(lambda: entries(server, directory) == [])
