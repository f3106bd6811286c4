"""Decode names a prefill rank's part again and again until it is confirmed, and prefill carries it out once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from tests.helpers.fakes import FakeDecode
from tests.helpers.pools import Kv, Memory

import statelink
from statelink import wire
from statelink.registry import load_backend

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_part_that_is_named_again_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill is still busy with the part, because its backend has not connected."""
    kind, connecting, go_on = load_backend("tcp"), threading.Event(), threading.Event()
    connect = kind.connect

    def late(self: Any, *given: Any) -> None:
        connecting.set()
        assert go_on.wait(20)
        connect(self, *given)

    pools = (Kv(layers=(0,), pages=4),)
    memory = Memory(tmp_path / "prefill", pools)
    with statelink.open({"role": "prefill", "backend": "tcp", "inspect": False}, memory.inventory("prefill")) as link:
        fake = FakeDecode(tmp_path, link.address, pools)
        try:
            fake.greet()
            assert fake.theirs is not None
            fake.backend.connect(fake.peer, fake.theirs.descriptor, fake.theirs.inventory.regions)
            attach, plan = fake.plan()
            with monkeypatch.context() as patch:
                patch.setattr(kind, "connect", late)
                fake.say(attach)
                assert connecting.wait(20)
                for _ in range(10):
                    fake.say(attach)
                fake.say(wire.Ping(sender=fake.name, to=fake.peer))
                fake.hear(wire.Pong)  # what came before it is handled
                waiting = link.snapshot()["load"]["setups"]
                go_on.set()
                assert fake.hear(wire.Attached).digest == plan.digest
            assert waiting == 0
            fake.say(attach)
            assert fake.hear(wire.Attached).digest == plan.digest, "the confirmation may be lost"
        finally:
            go_on.set()
            fake.close()
