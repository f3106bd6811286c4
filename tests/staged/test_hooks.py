"""The two hooks of one room against a counterpart that says anything at any time: refused, and no space is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from statelink import plan, state
from statelink.backend import Blocks
from statelink.errors import RoomError, StatelinkError, WireError
from statelink.plan import Tile
from statelink.staged._memory import HostMemory
from statelink.staged._messages import Ask, Lent, Place, Written, write
from statelink.staged._receive import MOST, StagedReceive
from statelink.staged._ring import Ring
from statelink.staged._send import StagedSend

WHOLE = {"lent": 0, "waiting": 0, "quarantined": 0}
LAYERS, PAGES, HEADS, DIM = 2, 6, 2, 4
GRANULE = 4 * DIM
"""Bytes of a page of one tensor that one of two prefill ranks has: four tokens of one head."""
ASKED = 4 * GRANULE
"""Bytes of a page of all tensors."""


def pages(rank: int | None, fill: int) -> tuple[dict[int, Any], state.Described]:
    heads = HEADS if rank is None else 1
    arrays = {n: tuple(np.full((PAGES, 4, heads, DIM), fill, np.uint8) for _ in range(2)) for n in range(LAYERS)}
    share = {"heads": HEADS} if rank is None else {"heads": HEADS, "tp": (rank, 2)}
    return arrays, state.kv_pages(arrays, **share)  # type: ignore[arg-type]


class Context:
    """What a hook sees of its room; notes what it does."""

    room, generation, peer, component = 7, 1, "peer", "kv"

    def __init__(self, expected: plan.Move) -> None:
        self._expected = expected
        self.said: list[Any] = []
        self.lent: list[tuple[int, int]] = []
        self.woken = 0

    def message(self, payload: bytes) -> None:
        self.said.append(msgspec.msgpack.Decoder(Ask | Lent | Written).decode(payload))

    def wake(self) -> None:
        self.woken += 1

    def expected(self) -> plan.Move:
        return self._expected

    def lend(self, address: int, nbytes: int, then: Callable[[], None]) -> None:
        self.lent.append((address, nbytes))
        then()


class Scene:
    """A prefill rank with half of the heads, a decode rank, and a request of four pages."""

    def __init__(self, ring_bytes: int = 2048) -> None:
        self.source, ours = pages(0, 1)
        _, beside = pages(1, 2)
        self.target, theirs = pages(None, 0)
        sources = [state.describe("p", [each], rank=n, ranks=2) for n, each in enumerate((ours, beside))]
        target = state.describe("d", [theirs])
        part = next(each for each in plan.route(sources, [target]) if each.source == 0)
        component = plan.compile_pair(sources[0], target, part).components["kv"]
        owed = plan.due(component.source, component.target, 16, 0)
        items = plan.required(component.target, 16, 0, [5, 1, 2, 4])
        self.move = plan.plan_move(component, plan.pushed(component.source, 16, 0, (0, 16), [0, 3, 4, 1]), items, owed)
        self.expected = plan.expected_move(component, items, owed)
        self.context = Context(self.expected)
        self.ring = Ring(HostMemory(ring_bytes), 1)

    def receiver(self) -> StagedReceive:
        hook = StagedReceive({"kv": self.ring}, lambda component, move: True)
        assert hook.prepare(self.context)
        return hook

    def sender(self, ring_bytes: int = 4096) -> StagedSend:
        hook = StagedSend({"kv": self.ring}, ASKED)
        hook.open(self.context, write(Place(9, 1 << 40, ring_bytes)))
        return hook

    def say(self, hook: StagedReceive | StagedSend, *messages: Any) -> None:
        for each in messages:
            hook.message(self.context, each if isinstance(each, bytes) else write(each))

    def end(self, hook: StagedReceive | StagedSend) -> None:
        """The room fails, and nothing is on the move any more."""
        hook.abort(self.context)
        hook.released(self.context)
        assert whole(self.ring) == WHOLE

    def untouched(self) -> bool:
        return not any(array.any() for pair in self.target.values() for array in pair)


def whole(ring: Ring) -> dict[str, int]:
    return {name: number for name, number in ring.snapshot().items() if name != "bytes"}


def raw(*fields: Any) -> bytes:
    """A message by its fields, whatever they are."""
    return msgspec.msgpack.encode(fields)


def tiles(first: int = 0, last: int = 1, buffers: tuple[int, int] = (0, 4), group: int = 0) -> list[Any]:
    return [(group, buffers, (first, last))]


def test_what_both_say_when_all_is_well() -> None:
    """The tests' own words are right: with them, all pages arrive."""
    scene = Scene()
    hook = scene.receiver()
    for page in range(4):
        scene.say(hook, Ask(page, ASKED))
        at = scene.context.lent[page][0] - scene.ring.memory.address
        scene.ring.memory.pack([scene.move.places(Tile(0, (0, 4), (page, page + 1)), "source")], at)
        scene.say(hook, Written(page, None, tiles(page, page + 1)))
    hook.finish(scene.context)
    assert whole(scene.ring) == WHOLE
    for key, value in scene.target.values():
        for array in (key, value):
            assert (array[[5, 1, 2, 4], :, 0] == 1).all()
            assert not array[[0, 3]].any()
            assert not array[:, :, 1].any()


def test_what_both_say_that_they_wait_for() -> None:
    """Space that was asked for, on the side that is to lend it; then that it is used."""
    here, there = Scene(ASKED), Scene(ASKED)
    sender, receiver = here.sender(), there.receiver()
    assert (sender.waits(), receiver.waits()) == ("", "")
    steps = iter(sender.chunk(here.context, here.move))
    assert next(steps) is None
    assert sender.waits() == f"{4 * ASKED} bytes of decode's staging ring of 4096"
    here.say(sender, Lent(0, 0), Lent(1, ASKED))
    own = (
        f"{ASKED} bytes of this side's staging ring ({ASKED} of its {ASKED} bytes are lent, 0 of those are quarantined)"
    )
    assert sender.waits() == f"{2 * ASKED} bytes of decode's staging ring of 4096 and {own}"
    there.say(receiver, Ask(0, ASKED), Ask(1, ASKED))
    assert receiver.waits() == f"{own} and {ASKED} bytes that prefill has space for in this side's staging ring"
    here.end(sender)
    there.end(receiver)


FAR = (1 << 62) - 1
LIES: list[tuple[list[Any], str]] = [
    ([b""], "cannot be read"),
    ([b"\xc1nonsense"], "cannot be read"),
    ([raw("ask", 0, -1)], "cannot be read"),
    ([raw("ask", -1, ASKED)], "cannot be read"),
    ([raw("ask", 0, 1 << 62)], "cannot be read"),
    ([raw("ask", 0, 1.5)], "cannot be read"),
    ([raw("more", 0, ASKED)], "cannot be read"),
    ([Ask(0, 0)], "it has 0 bytes, and the ring 2048"),
    ([Ask(0, 2049)], "it has 2049 bytes, and the ring 2048"),
    ([Ask(0, FAR)], "can never fit into the staging memory"),
    ([Ask(1, ASKED)], "too much space at once, or twice"),
    ([Ask(0, ASKED), Ask(0, ASKED)], "too much space at once, or twice"),
    ([Ask(n, ASKED) for n in range(MOST + 1)], "too much space at once"),
    ([Lent(0, 0)], "prefill says 'lent'"),
    ([Written(0, None, tiles())], "prefill wrote where nothing was lent"),
    ([Ask(0, ASKED), Written(1, None, tiles())], "prefill wrote where nothing was lent"),
    ([Ask(0, ASKED), Written(0, None, tiles()), Written(0, None, tiles())], "prefill wrote where nothing was lent"),
    ([Ask(0, 2048), Ask(1, 2048), Written(1, None, tiles())], "prefill wrote where nothing was lent"),
    ([Ask(0, ASKED), Written(0, None, [])], "64 bytes asked for, 0 written"),
    ([Ask(0, ASKED), Written(0, None, tiles(0, 2))], "64 bytes asked for, 128 written"),
    ([Ask(0, ASKED), Written(0, (1, 2), tiles())], "what is not due"),
    ([Ask(0, ASKED), Written(0, (7, 9), tiles())], "what is not due"),
    ([Ask(0, ASKED), Written(0, (-(1 << 62), 1 << 62), tiles(4, 5))], "what is not due"),
    ([Ask(0, ASKED), Written(0, None, tiles(group=1))], "what is not due"),
    ([Ask(0, ASKED), Written(0, None, tiles(4, 5))], "what is not due"),
    ([Ask(0, ASKED), Written(0, None, tiles(FAR - 1, FAR))], "what is not due"),
    ([Ask(0, ASKED), Written(0, None, tiles(buffers=(1, 5)))], "what is not due"),
    ([Ask(0, ASKED), Written(0, None, tiles(3, 7, (3, 4)))], "what is not due"),
    ([Ask(0, ASKED), Written(0, None, tiles(1, 0))], "64 bytes asked for, 0 written"),
    ([Ask(0, ASKED), Written(0, None, tiles(0, FAR) * 256)], "64 bytes asked for, "),
    ([Ask(0, ASKED), raw("written", 0, None, tiles() * 257)], "cannot be read"),
    ([Ask(0, ASKED), raw("written", 0, None, tiles(-1, 0))], "cannot be read"),
    ([Ask(0, ASKED), Written(0, None, tiles(buffers=(0, 2)) * 2)], "what has come before"),
]


@pytest.mark.parametrize(("said", "text"), LIES)
def test_decode_believes_no_parcel_that_does_not_add_up(said: list[Any], text: str) -> None:
    """Each is an error of its room with a clear text; nothing is written, and all space comes back."""
    scene = Scene()
    hook = scene.receiver()
    scene.say(hook, *said[:-1])
    with pytest.raises(StatelinkError, match=text):
        scene.say(hook, said[-1])
    if not any(isinstance(each, Written) for each in said[:-1]):
        assert scene.untouched()
    scene.end(hook)


def test_decode_takes_no_piece_twice() -> None:
    """Twice the first page, and never the second: the bytes add up, and the room must not succeed."""
    scene = Scene()
    hook = scene.receiver()
    scene.say(hook, Ask(0, ASKED), Written(0, None, tiles()), Ask(1, ASKED))
    with pytest.raises(RoomError, match="what has come before"):
        scene.say(hook, Written(1, (0, 1), tiles(buffers=(0, 2)) + tiles(1, 2, (0, 2))))
    with pytest.raises(RoomError, match="256 bytes promised, 64 written"):
        hook.finish(scene.context)
    scene.end(hook)


def test_a_parcel_that_says_much_costs_little() -> None:
    """What a message of a few bytes names is not worked out before it is known to be what was asked for."""
    scene = Scene()
    hook = scene.receiver()
    worked_out = 0
    places = plan.Move.places

    def counted(*args: Any) -> Any:
        nonlocal worked_out
        worked_out += 1
        return places(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan.Move, "places", counted)
        scene.say(hook, Ask(0, ASKED))
        with pytest.raises(WireError, match="asked for"):
            scene.say(hook, Written(0, None, tiles(0, 4) * 256))
    assert not worked_out
    scene.end(hook)


PLACES = [
    (b"\xc1nonsense", "cannot be read"),
    (raw(-1, 0, 64), "cannot be read"),
    (raw(1 << 32, 0, 64), "cannot be read"),
    (raw(1, 0, -64), "cannot be read"),
    (raw(1, 0, 1 << 62), "cannot be read"),
    (raw(1, -1, 64), "64 bytes at -0x1"),
    (raw(1, (1 << 64) - 63, 64), "64 bytes at 0xffffffffffffffc1"),
    (raw(1, 0), "cannot be read"),
]


@pytest.mark.parametrize(("prepared", "text"), PLACES)
def test_prefill_takes_no_ring_that_cannot_be(prepared: bytes, text: str) -> None:
    scene = Scene()
    with pytest.raises(WireError, match=text):
        StagedSend({"kv": scene.ring}, ASKED).open(scene.context, prepared)


@pytest.mark.parametrize("nbytes", [0, 1, GRANULE - 1])
def test_prefill_says_what_never_fits_into_the_others_ring(nbytes: int) -> None:
    scene = Scene()
    hook = scene.sender(nbytes)
    with pytest.raises(RoomError, match=f"{GRANULE} bytes cannot be divided, and a parcel has {nbytes} at most"):
        list(hook.chunk(scene.context, scene.move))
    scene.end(hook)


CREDITS: list[tuple[list[Any], str]] = [
    ([b"\x80"], "cannot be read"),
    ([raw("lent", 0, -1)], "cannot be read"),
    ([raw("lent", 0, 1 << 62)], "cannot be read"),
    ([Ask(0, ASKED)], "decode says 'ask'"),
    ([Written(0, None, [])], "decode says 'written'"),
    ([Lent(4, 0)], "decode lends space that nobody asked for"),
    ([Lent(FAR, FAR)], "decode lends space that nobody asked for"),
    ([Lent(0, 0), Lent(0, 256)], "decode lends space that nobody asked for"),
]


@pytest.mark.parametrize(("said", "text"), CREDITS)
def test_prefill_believes_no_credit_that_nobody_gave(said: list[Any], text: str) -> None:
    scene = Scene()
    hook = scene.sender()
    blocks = iter(hook.chunk(scene.context, scene.move))
    assert next(blocks) is None
    assert scene.context.said == [Ask(n, ASKED) for n in range(4)]
    scene.say(hook, *said[:-1])
    with pytest.raises(WireError, match=text):
        scene.say(hook, said[-1])
    scene.end(hook)


@pytest.mark.parametrize("offset", [4096 - ASKED + 1, 4096, FAR])
def test_prefill_writes_nothing_beyond_the_others_ring(offset: int) -> None:
    scene = Scene()
    hook = scene.sender()
    blocks = iter(hook.chunk(scene.context, scene.move))
    next(blocks)
    scene.say(hook, Lent(0, offset))
    with pytest.raises(WireError, match=f"64 bytes at {offset} of 4096"):
        next(blocks)
    scene.end(hook)


def test_a_credit_at_the_end_of_the_ring_is_used() -> None:
    scene = Scene()
    hook = scene.sender()
    blocks = iter(hook.chunk(scene.context, scene.move))
    next(blocks)
    scene.say(hook, Lent(0, 4096 - ASKED))
    block = next(blocks)
    assert isinstance(block, Blocks)
    assert (int(block.target[0]), int(block.nbytes[0])) == ((1 << 40) + 4096 - ASKED, ASKED)
    assert next(blocks) is None
    assert whole(scene.ring)["lent"] == ASKED, "it may still be read"
    scene.end(hook)


@pytest.mark.parametrize("end", [("abort",), ("abort", "released"), ("released",)])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_room_that_ends_while_space_is_on_its_way(side: str, end: tuple[str, ...]) -> None:
    """The ring has just decided for it, on another thread, when its hook hears of the end."""
    scene = Scene()
    hook: StagedReceive | StagedSend = scene.receiver() if side == "decode" else scene.sender()
    if isinstance(hook, StagedSend):
        next(iter(hook.chunk(scene.context, scene.move)))
    ask = scene.ring.ask

    def late(owner: object, nbytes: int, then: Callable[[int], None], *, peer: str) -> None:
        def decided(at: int) -> None:
            for each in end:
                getattr(hook, each)(scene.context)
            then(at)

        ask(owner, nbytes, decided, peer=peer)

    scene.ring.ask = late  # type: ignore[method-assign]
    scene.say(hook, Ask(0, ASKED) if side == "decode" else Lent(0, 0))
    if "released" not in end:
        hook.released(scene.context)
    assert whole(scene.ring) == WHOLE
    assert not scene.context.woken


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_room_that_has_ended_asks_for_nothing(side: str) -> None:
    scene = Scene()
    hook: StagedReceive | StagedSend = scene.receiver() if side == "decode" else scene.sender()
    if isinstance(hook, StagedSend):
        next(iter(hook.chunk(scene.context, scene.move)))
    scene.end(hook)
    scene.say(hook, Ask(0, ASKED) if side == "decode" else Lent(0, 0))
    assert whole(scene.ring) == WHOLE


def test_a_component_that_is_not_staged_hears_nothing() -> None:
    scene = Scene()
    hook = StagedReceive({"kv": scene.ring}, lambda component, move: False)
    assert hook.prepare(scene.context) == b""
    with pytest.raises(WireError, match="'ask' of a component that is not staged"):
        scene.say(hook, Ask(0, ASKED))
    scene.end(hook)
