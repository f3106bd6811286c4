"""Peers that pass the handshake and then lie about staging: it costs them their room, and nobody else anything.

What each lie is answered with is told in `tests.staged.test_hooks`; here, that a link survives them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from tests.helpers import peers
from tests.helpers.expect import carry
from tests.helpers.fakes import FakeDecode, FakePrefill
from tests.helpers.pools import Kv
from tests.link.conftest import FORCED
from tests.link.test_impostors import use
from tests.staged.scene import ask, gathered, granted, raw, read, ring_at, written

from statelink import Status, wire
from statelink.backend import Batch, Blocks, Moved
from statelink.plan import Tile, due, plan_move, pushed, required

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helpers.engine import LinkHandle, RoomHandle
    from tests.helpers.expect import Case
    from tests.helpers.pair import Pair
    from tests.link.conftest import TwoEngines

pytestmark = [
    pytest.mark.parametrize("backend", ["tcp"], indirect=True, scope="session"),
    pytest.mark.staged,
]

POOLS = (Kv(),)
RING = FORCED["ring_bytes"]
FAR = (1 << 62) - 1


@pytest.fixture
def made(two_engines: TwoEngines) -> Pair:
    return two_engines.pair(POOLS, POOLS)


@pytest.fixture
def decode(made: Pair, tmp_path: Path) -> Iterator[FakeDecode]:
    """Someone who asks the pair's prefill."""
    fake = FakeDecode(tmp_path, made.prefill.address, POOLS, RING)
    fake.attach()
    yield fake
    fake.say(wire.Bye(sender=fake.name, to=made.prefill.name))
    peers.until(lambda: fake.name not in made.prefill.snapshot()["peers"])
    fake.close()


@pytest.fixture
def prefill(made: Pair, tmp_path: Path) -> Iterator[FakePrefill]:
    """Someone whom the pair's decode asks."""
    fake = FakePrefill(tmp_path, POOLS, RING)
    yield fake
    fake.say(wire.Bye(sender=fake.name, to=fake.peer))
    peers.until(lambda: fake.address not in made.decode.snapshot()["peers"])
    fake.close()


def whole(link: LinkHandle) -> None:
    """All space of a link's ring has come back."""
    peers.until(
        lambda: not sum(link.snapshot()["strategies"]["staged"][n] for n in ("in_use", "waiting", "quarantined"))
    )


def note(fake: FakeDecode | FakePrefill, case: Case, generation: int, said: Any) -> wire.Note:
    return wire.Note(**use(fake, case, generation), component="kv", payload=raw(said))


def asked(made: Pair, decode: FakeDecode, generation: int, prepared: bytes | None = None) -> tuple[Case, RoomHandle]:
    """A room of which prefill has asked for space, if what was prepared allows it."""
    case = made.case()
    ring = ring_at(decode.ring_region, decode.ring.ctypes.data, RING) if prepared is None else prepared
    sending = made.send(case, deadline=30)
    made.push(sending, case)
    decode.say(decode.request(case, generation, prepared={"kv": ring}))
    if prepared is None:
        assert read(decode.hear(wire.Note, case.room).payload) == ask(0, FORCED["parcel_bytes"])
    return case, sending


def test_a_decode_that_lies(made: Pair, decode: FakeDecode) -> None:
    beyond = decode.ring.ctypes.data + RING
    rings = [(b"nonsense", "a staging ring cannot be read")]
    credits: list[tuple[list[Any], str]] = [
        ([b"nonsense"], "a staging message cannot be read"),
        ([granted(1, 0), granted(1, 0)], "decode grants space that nobody asked for"),
        ([granted(0, RING)], "decode grants space beyond its ring"),
    ]
    places: list[tuple[bytes, int, str]] = [
        (ring_at(99, decode.ring.ctypes.data, RING), 0, "registered by the peer"),
        (ring_at(decode.ring_region, beyond, RING), 0, "registered by the peer"),
        (ring_at(decode.ring_region, (1 << 64) - RING, RING), 0, "registered by the peer"),
        (ring_at(decode.ring_region, decode.ring.ctypes.data, FAR), RING - 1, "registered by the peer"),
        (ring_at(0, decode.ring.ctypes.data, RING), 0, "registered by the peer"),
    ]
    before = decode.memory.copy()
    lies: list[tuple[bytes | None, list[Any], str]] = [
        *((prepared, [], text) for prepared, text in rings),
        *((None, said, text) for said, text in credits),
        *((place, [granted(0, offset)], text) for place, offset, text in places),
    ]
    for generation, (prepared, said, text) in enumerate(lies, 1):
        case, sending = asked(made, decode, generation, prepared)
        if prepared is not None and said:
            decode.hear(wire.Note, case.room)
        for each in said:
            decode.say(note(decode, case, generation, each))
        failed = decode.hear(wire.Failed, case.room)
        assert (failed.room, failed.generation) == (case.room, generation)
        assert text in str(failed.reason), said
        assert sending.why() == failed.reason
        assert sending.wait(quiesced=True).quiesced
        made.done(case)
    assert decode.memory.differences(before) == []
    whole(made.prefill)
    made.run()
    assert made.errors() == []


def test_credits_of_other_rooms_and_uses(made: Pair, decode: FakeDecode) -> None:
    """They are nobody's: what they name was not asked for in this use of this room, or is not looked at."""
    case, sending = asked(made, decode, 5)
    other = made.case()
    for said in (note(decode, case, 4, granted(0, 0)), note(decode, other, 5, granted(0, 0))):
        decode.say(said)
    decode.say(msgspec.structs.replace(note(decode, case, 5, granted(0, 0)), component="no"))
    decode.say(wire.Ping(sender=decode.name, to=made.prefill.name))
    decode.hear(wire.Pong)
    assert sending.see().status is Status.TRANSFERRING
    assert made.prefill.snapshot()["strategies"]["staged"]["in_use"] == 0
    sending.abort()
    assert sending.wait(quiesced=True).quiesced
    whole(made.prefill)
    for each in (case, other):
        made.done(each)


class Writer:
    """A fake prefill's side of one room, whose bytes are what decode should have in the end."""

    def __init__(self, made: Pair, fake: FakePrefill, attached: bool) -> None:
        self.made, self.fake = made, fake
        self.case = made.case(200)
        self.receiving = made.decode.receive(self.case.room, fake.address, 200, self.case.target, deadline=30)
        if not attached:
            fake.attached()
            assert fake.theirs is not None
            fake.backend.connect(fake.peer, fake.theirs.descriptor, fake.theirs.inventory.regions)
        self.request = fake.hear(wire.Request)
        self.there, self.start, _ = read(self.request.prepared["kv"])
        assert fake.plan is not None
        plan = fake.plan.components["kv"]
        owed = due(plan.source, plan.target, 200, 0)
        target = required(plan.target, 200, 0, self.case.target["kv"])
        self.move = plan_move(plan, pushed(plan.source, 200, 0, (0, 200), self.case.source["kv"]), target, owed)
        self.parcels = list(self.move.parcels(FORCED["parcel_bytes"]))

    def say(self, said: Any) -> None:
        self.fake.say(note(self.fake, self.case, self.request.generation, said))

    def nbytes(self, tiles: tuple[Tile, ...]) -> int:
        return sum(self.move.tile_nbytes(tile) for tile in tiles)

    def stage(self, number: int, tiles: tuple[Tile, ...]) -> None:
        """Ask for a parcel's space, and write to it."""
        nbytes = self.nbytes(tiles)
        self.say(ask(number, nbytes))
        offset = self.offset_lent()
        self.fake.ring[:nbytes] = gathered(self.move, tiles)
        self.write(offset, nbytes)

    def offset_lent(self) -> int:
        """Where decode grants space."""
        word, _, offset = read(self.fake.hear(wire.Note, self.case.room).payload)
        assert word == "granted"
        return int(offset)

    def write(self, offset: int, nbytes: int) -> bool:
        """Write to decode's ring; whether that was let through."""
        fake = self.fake
        wide = np.array([[fake.ring.ctypes.data], [self.start + offset], [nbytes]], np.uint64)
        narrow = np.array([[fake.ring_region], [self.there]], np.uint32)
        blocks = Blocks(*wide, *narrow)
        transfer = fake.backend.submit(fake.peer, Batch(blocks, self.case.room, self.request.generation))

        def ended() -> bool:
            fake.backend.poll([transfer])
            return transfer.outcome is not None

        peers.until(ended)
        assert transfer.outcome is not None
        return transfer.outcome.ok

    def finished(self) -> None:
        fake = self.fake
        assert fake.plan is not None
        moved = {"kv": Moved(self.move.nbytes, 1)}
        who = use(fake, self.case, self.request.generation)
        fake.say(wire.Finished(**who, digest=fake.plan.digest, moved=moved, chunks=1))

    def failed(self, text: str) -> None:
        """Its room fails, for this reason, and for nobody else."""
        assert text in str(self.fake.hear(wire.Failed).reason)
        assert text in self.receiving.failed()
        assert self.receiving.wait(quiesced=True).quiesced
        self.made.spoilt(self.case)
        whole(self.made.decode)


def test_an_honest_prefill(made: Pair, prefill: FakePrefill) -> None:
    """The impostor's tools are right: with them, a whole request works."""
    writer = Writer(made, prefill, attached=False)
    for number, tiles in enumerate(writer.parcels):
        writer.stage(number, tiles)
        writer.say(written(number, None, list(tiles)))
    writer.finished()
    prefill.hear(wire.Received)
    writer.receiving.succeeded()
    carry([prefill.memory], made.expected, writer.case)
    made.done(writer.case)
    made.verify()
    whole(made.decode)


def test_a_prefill_that_lies(made: Pair, prefill: FakePrefill) -> None:
    lies: list[tuple[list[Any], str]] = [
        ([b"nonsense"], "a staging message cannot be read"),
        ([ask(number, 64) for number in range(17)], "prefill asks for too much space at once, or twice"),
        ([written(0, None, [])], "prefill wrote where no space was granted"),
    ]
    for number, (said, text) in enumerate(lies):
        writer = Writer(made, prefill, attached=number > 0)
        for each in said:
            writer.say(each)
        writer.failed(text)
    writer = Writer(made, prefill, attached=True)
    for number in range(2):  # the same twice
        writer.stage(number, writer.parcels[0])
        writer.say(written(number, None, list(writer.parcels[0])))
    writer.failed("a tile names what has come before")
    writer = Writer(made, prefill, attached=True)
    writer.stage(0, writer.parcels[0])
    writer.say(written(0, None, list(writer.parcels[0])))
    writer.finished()  # but for most of it
    writer.failed("a writer did not stage what the plan promised")
    made.run()
    assert made.errors() == []


def test_a_prefill_that_writes_where_nothing_was_lent(made: Pair, prefill: FakePrefill) -> None:
    """Decode's backend lets nothing through into its ring, or its pages, but what was lent."""
    writer = Writer(made, prefill, attached=False)
    assert not writer.write(0, 64)
    writer.say(ask(0, 64))
    offset = writer.offset_lent()
    assert not writer.write(offset, 65)
    assert not writer.write(offset + 256, 64)
    assert writer.write(offset, 64)
    writer.receiving.abort()
    assert writer.receiving.wait(quiesced=True).quiesced
    assert not writer.write(offset, 64), "it is somebody else's"
    made.spoilt(writer.case)
    whole(made.decode)
    made.run()
