"""Prefill connects to a decode rank while the first messages travel."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.helpers.expect import Case
from tests.helpers.fakes import FakeDecode
from tests.helpers.pools import Kv, Memory

import statelink
from statelink import Status, wire
from statelink.errors import Reason, TransferError
from statelink.registry import load_backend

if TYPE_CHECKING:
    from pathlib import Path


TOKENS = 64


@pytest.mark.parametrize("reaches", [True, False])
def test_what_waits_for_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reaches: bool) -> None:
    """The only rank of an instance connects once it is greeted. It compiles a part, and keeps a request, meanwhile."""
    kind, connecting, go_on = load_backend("tcp"), threading.Event(), threading.Event()
    connect = kind.connect

    def late(self: Any, *given: Any) -> None:
        connecting.set()
        assert go_on.wait(20)
        if not reaches:
            raise TransferError("nobody is there")
        connect(self, *given)

    monkeypatch.setattr(kind, "connect", late)
    pools = (Kv(layers=(0,), pages=4),)
    memory = Memory(tmp_path / "prefill", pools)
    with statelink.open({"role": "prefill", "backend": "tcp", "inspect": False}, memory.inventory("prefill")) as link:
        fake = FakeDecode(tmp_path, link.address, pools)
        try:
            fake.greet()
            assert connecting.wait(20)
            assert fake.theirs is not None
            connect(fake.backend, fake.peer, fake.theirs.descriptor, fake.theirs.inventory.regions)
            attach, plan = fake.plan()
            for _ in range(10):
                fake.say(attach)
            told = fake.hear(wire.Attached)
            assert (told.digest, told.connecting) == (plan.digest, True)
            case = Case(1, TOKENS, 0, {"kv": [2, 0, 1, 3]}, {"kv": [3, 1, 2, 0]})
            sending = link.send(case.room, TOKENS)
            sending.push(case.source)
            fake.say(fake.request(case, 1))
            for room in (2, 3):
                fake.say(fake.request(dataclasses.replace(case, room=room), 1))
            fake.say(wire.Failed(sender=fake.name, to=fake.peer, room=2, generation=1, reason=Reason("x", "no more")))
            fake.hear(wire.Drained, 2)  # what came before it is handled
            load = link.snapshot()["load"]
            assert (load["setups"], load["pending_requests"]) == (1, 2), "the part was compiled once"
            assert sending.claimed
            sending.abort_unclaimed("another request is waited for")  # it does nothing
            soon = link.send(3, TOKENS, deadline=0.2)
            assert soon.wait(20) is Status.FAILED
            assert f"the backend still connects to {fake.name}" in str(soon.reason)
            go_on.set()
            if reaches:
                assert not fake.hear(wire.Attached).connecting
                assert fake.hear(wire.Finished).room == 1
                fake.say(attach)
                assert fake.hear(wire.Attached).digest == plan.digest, "the confirmation may be lost"
            else:
                assert "nobody is there" in str(fake.hear(wire.Refuse).reason)
                assert fake.hear(wire.Failed).reason.code == "room.unattached"
                assert fake.hear(wire.Drained).room == 1
            assert link.snapshot()["load"]["pending_requests"] == 0, "nobody waits for the second one any more"
        finally:
            go_on.set()
            fake.close()


def test_a_part_that_is_named_anew_replaces_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both wait for the connection. Requests that come after the second one are for the second one."""
    kind, go_on = load_backend("tcp"), threading.Event()
    connect = kind.connect

    def late(self: Any, *given: Any) -> None:
        assert go_on.wait(20)
        connect(self, *given)

    monkeypatch.setattr(kind, "connect", late)
    pools = (Kv(layers=(0,), pages=4),)
    memory = Memory(tmp_path / "prefill", pools)
    with statelink.open({"role": "prefill", "backend": "tcp", "inspect": False}, memory.inventory("prefill")) as link:
        fake = FakeDecode(tmp_path, link.address, pools)
        try:
            fake.greet()
            assert fake.theirs is not None
            connect(fake.backend, fake.peer, fake.theirs.descriptor, fake.theirs.inventory.regions)
            attach, _ = fake.plan()
            for destinations in (2, 1):
                fake.say(msgspec.structs.replace(attach, destinations=destinations))
                assert fake.hear(wire.Attached).connecting
            case = Case(1, TOKENS, 0, {"kv": [2, 0, 1, 3]}, {"kv": [3, 1, 2, 0]})
            link.send(case.room, TOKENS).push(case.source)
            fake.say(fake.request(case, 1))
            fake.say(wire.Failed(sender=fake.name, to=fake.peer, room=2, generation=1, reason=Reason("x", "no more")))
            fake.hear(wire.Drained, 2)  # what came before it is handled
            go_on.set()
            assert fake.hear(wire.Finished, timeout=10).room == 1, "no other rank has to ask"
        finally:
            go_on.set()
            fake.close()
