"""Decode hears how the connection of a prefill rank ended that has confirmed its part before that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.helpers.fakes import FakePrefill
from tests.helpers.pools import Kv, Memory

import statelink
from statelink import Status, wire
from statelink.errors import Reason

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("reaches", [True, False])
def test_the_part_is_named_again_until_the_backend_has_connected(tmp_path: Path, reaches: bool) -> None:
    """The message that says so may be lost, with a control connection that breaks."""
    pools = (Kv(layers=(0,), pages=4),)
    fake, memory = FakePrefill(tmp_path, pools), Memory(tmp_path / "here", pools)
    config = {"role": "decode", "backend": "tcp", "heartbeat": 0.2, "inspect": False}
    with statelink.open(config, memory.inventory("decode")) as decode:
        receiving = decode.receive(1, fake.address, 64, {"kv": [3, 1, 2, 0]})
        fake.attached(connecting=True)
        assert fake.plan is not None
        fake.hear(wire.Request)  # decode may have named the part twice before
        fake.hear(wire.Attach, timeout=10)
        if reaches:
            fake.say(wire.Attached(sender=fake.name, to=fake.peer, digest=fake.plan.digest, transport="socket"))
            while decode.snapshot()["ranks"][0]["transport"] != "socket":
                decode.changes(0.1)
        else:
            fake.say(wire.Refuse(sender=fake.name, to=fake.peer, reason=Reason("x", "nobody is there")))
            assert receiving.wait(20) is Status.FAILED
            assert receiving.reason is not None
            assert "nobody is there" in str(receiving.reason)
    fake.close()
