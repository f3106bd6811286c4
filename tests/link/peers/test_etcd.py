"""Links in processes of their own that find each other through etcd, which may die."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.etcd import Etcd
from tests.helpers.pair import Pair

if TYPE_CHECKING:
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
