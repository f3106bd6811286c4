"""What a link counts of its rooms: outcomes, bytes and latencies, against what the test itself did and timed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tests.helpers.fakes import FakeDecode
from tests.helpers.links import Rank, hand_over
from tests.helpers.peers import until
from tests.helpers.pools import Kv, Memory

import statelink
from statelink import Status, wire
from statelink.errors import Reason

if TYPE_CHECKING:
    from pathlib import Path

PAGE_BYTES = 2 * 16 * 2 * 8
"""Of a page of `Rank`: keys and values."""
MOST = 256
"""Outcomes that are counted apart."""


def test_outcomes_bytes_and_latencies() -> None:
    source, target = Rank("prefill", 1), Rank("decode")
    config = {"backend": "tcp"}
    with source.open(config, role="prefill") as prefill, target.open(config, role="decode") as decode:
        assert prefill.snapshot()["totals"]["rooms"] == {}
        began = time.monotonic()
        hand_over(prefill, decode, source, target)
        took = time.monotonic() - began
        for room in (2, 3):
            sending, receiving = prefill.send(room, 16), decode.receive(room, prefill.address, 16, {"kv": [room]})
            until(lambda: sending.status is Status.WAITING)  # noqa: B023 - it is called at once
            sending.abort()
            assert receiving.wait(20) is sending.wait(20) is Status.FAILED
        seen = {link.snapshot()["role"]: link.snapshot()["totals"] for link in (prefill, decode)}
    for role, totals in seen.items():
        assert totals["rooms"] == {role: {"succeeded": 1, "room.aborted": 2}}
        ((transport, nbytes),) = totals["bytes"][role]["kv"].items()
        assert (list(totals["bytes"][role]), nbytes) == (["kv"], 10 * PAGE_BYTES)
        assert transport in ("process_vm", "socket")
        for stage in ("waited", "transferred"):
            histogram, bounds = totals["seconds"][role][stage], [0.0, *totals["bounds"], float("inf")]
            assert len(histogram["counts"]) == len(bounds) - 1
            assert sum(histogram["counts"]) == 1
            bucket = histogram["counts"].index(1)
            assert bounds[bucket] <= histogram["sum"] <= min(bounds[bucket + 1], took)


def test_peers_cannot_make_the_counts_many(tmp_path: Path) -> None:
    """A peer chooses the code of a reason."""
    pools = (Kv(layers=(0,), pages=4),)
    memory = Memory(tmp_path / "prefill", pools)
    config: dict[str, Any] = {"role": "prefill", "backend": "tcp", "inspect": False}
    with statelink.open(config, memory.inventory("prefill")) as link:
        fake = FakeDecode(tmp_path, link.address, pools)
        try:
            fake.attach()
            for number in range(1, MOST + 11):
                sending = link.send(number, 16)
                use: dict[str, Any] = {"sender": fake.name, "to": link.name, "room": number, "generation": number}
                items = {"kv": wire.ItemList(0, bytes(8))}
                fake.say(wire.Request(**use, tokens=16, prefix=0, items=items))
                until(lambda: sending.status is Status.WAITING)  # noqa: B023 - it is called at once
                reason = Reason(f"evil.{number}", "it chose so", {}, "", "")
                fake.say(wire.Failed(**use, reason=reason, met=number))
                assert sending.wait(20) is Status.FAILED
        finally:
            fake.close()
        rooms = link.snapshot()["totals"]["rooms"]["prefill"]
    assert rooms.pop("other") == 10
    assert rooms == {f"evil.{number}": 1 for number in range(1, MOST + 1)}
