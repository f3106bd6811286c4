"""An instance that is started again at another address is found there, by rooms that wait for it, in any directory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.etcd import Etcd
from tests.helpers.pair import Pair
from tests.helpers.peers import until

from statelink.rendezvous import RendezvousServer

if TYPE_CHECKING:
    from tests.helpers.engine import LinkHandle
    from tests.link.conftest import TwoEngines

PATIENT_SECONDS = 240.0
"""As ``liveness``: rooms wait for a process that does not answer for so long, or a part of it."""

_prefixes = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, etcd_program: None) -> Iterator[Etcd]:
    made = Etcd(tmp_path_factory.mktemp("etcd"))
    yield made
    made.kill()


@pytest.fixture(params=["server", "etcd"])
def directory(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What links are configured with."""
    quick = {"heartbeat": 0.2, "liveness": 2.0}
    if request.param == "etcd":
        address = request.getfixturevalue("server").address
        yield {"rendezvous": f"{address}/moved-{next(_prefixes)}", "rendezvous_options": {"lifetime": 2}, **quick}
        return
    with RendezvousServer(lifetime=2.0) as made:
        yield {"rendezvous": made.address, **quick}


class Named(Pair):
    """A pair whose decode knows prefill by its instance's name."""

    def receive(self, case: Any, **named: Any) -> Any:
        return self.decode.receive(case.room, "prefill", case.tokens, case.target, prefix=case.prefix, **named)

    def beside(self, prefill: LinkHandle) -> Named:
        made = Named(prefill, self.decode)
        made.expected, made._busy = self.expected, self._busy
        return made

    def finish(self, case: Any, receiving: Any) -> None:
        """Send what decode waits for."""
        sending = self.send(case)
        self.push(sending, case)
        self.ended(case, receiving, sending)


tcp = pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session")


@tcp
def test_a_room_that_waits_is_served_by_the_next_process(two_engines: TwoEngines, directory: dict[str, Any]) -> None:
    """Also if another instance listens where the former process did, before and after the next one is there."""
    engine = two_engines.engine()
    first = two_engines.open("prefill", engine=engine, **directory)
    decode = two_engines.open("decode", **{**directory, "liveness": PATIENT_SECONDS})
    pair = Named(first, decode)
    pair.run()
    case = pair.case()
    waiting = decode.receive(case.room, "prefill", case.tokens, deadline=90)  # it has no memory yet
    engine.kill()
    until(lambda: decode.snapshot()["peers"]["prefill"] == "greeting")
    waiting.accept(case.target)
    other = two_engines.open("prefill", instance="other", listen=first.address, **directory)
    text = decode.receive(next(_rooms), "prefill", 64, deadline=2.0).failed(20)
    assert "prefill instance prefill is still greeting; no answer from tcp://127.0.0.1:" in text
    assert "(instance 'other' is there)" in text

    second = two_engines.open("prefill", **directory)
    assert second.address != first.address
    again = pair.beside(second)
    again.finish(case, waiting)
    again.run()
    Pair(other, two_engines.open("decode", **directory)).run()


_rooms = itertools.count(70_000)


@pytest.mark.parametrize("directory", ["server"], indirect=True)
@pytest.mark.parametrize("backend", ["nixl"], indirect=True, scope="session")
def test_memory_waits_for_the_former_process_while_rooms_go_to_the_next(
    two_engines: TwoEngines, directory: dict[str, Any]
) -> None:
    """The former process stands still in the middle of a room. Nothing but its own word, or its end, is proof."""
    engine = two_engines.engine()
    first = two_engines.open("prefill", engine=engine, **directory)
    decode = two_engines.open("decode", **directory)
    pair = Named(first, decode)
    pair.run()
    case = pair.case()
    receiving, sending = pair.begin(case, deadline=60)
    sending.push(case.span(0, 64, first.memory.pools), span=(0, 64))
    until(lambda: decode.snapshot()["rooms"]["transferring"] == 1)
    engine.stop()
    try:
        assert receiving.why(20).code == "peer.lost"
        pair.pardon(case)
        second = two_engines.open("prefill", **directory)
        again = pair.beside(second)
        other = again.case()
        again.finish(other, again.receive(other, deadline=60))
        again.run()
        assert not receiving.see().quiesced
        assert decode.snapshot()["quarantined"] == [case.room]
    finally:
        engine.go_on()
    until(lambda: receiving.see().quiesced)
    pair.spoilt(case)
    again.run()
