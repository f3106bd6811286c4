"""The two hooks of one room against a counterpart that says anything at any time: refused, and no space is lost."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from tests.staged.scene import ASKED, GRANULE, WHOLE, Context, Hook, Scene, ask, gathered, granted, raw, written

from statelink import plan
from statelink.backend import Blocks, SendHook
from statelink.errors import RoomError, StatelinkError, WireError
from statelink.plan import Tile

MOST = 16
"""Parcels of one room that a writer may ask for ahead."""


def tiles(first: int = 0, last: int = 1, buffers: tuple[int, int] = (0, 4), group: int = 0) -> list[Any]:
    return [(group, buffers, (first, last))]


def test_what_both_say_when_all_is_well() -> None:
    """The tests' own words are right: with them, all pages arrive."""
    scene = Scene()
    hook = scene.receiver()
    for page in range(4):
        scene.say(hook, ask(page, ASKED))
        address, nbytes = scene.context.lent[page]
        there = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        there[:] = gathered(scene.move, [Tile(0, (0, 4), (page, page + 1))])
        scene.say(hook, written(page, None, tiles(page, page + 1)))
    hook.finish(scene.context)
    assert scene.space() == WHOLE
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
    steps = iter(sender.blocks(here.context, here.move))
    assert next(steps) is None
    assert sender.waits() == f"{4 * ASKED} bytes of decode's staging ring of 4096"
    here.say(sender, granted(0, 0), granted(1, ASKED))
    situation = f"{ASKED} of its {ASKED} bytes are in use, 0 of those are quarantined"
    own = f"{ASKED} bytes of this side's staging ring ({situation})"
    assert sender.waits() == f"{2 * ASKED} bytes of decode's staging ring of 4096 and {own}"
    there.say(receiver, ask(0, ASKED), ask(1, ASKED))
    assert receiver.waits() == f"{own} and {ASKED} bytes that prefill has space for in this side's staging ring"
    here.end(sender)
    there.end(receiver)


FAR = (1 << 62) - 1
LIES: list[tuple[list[Any], str]] = [
    ([b""], "cannot be read"),
    ([b"\xc1nonsense"], "cannot be read"),
    ([b"\x91" * 20_000], "cannot be read"),
    ([raw(("ask", 0, -1))], "cannot be read"),
    ([raw(("ask", -1, ASKED))], "cannot be read"),
    ([raw(("ask", 0, 1 << 62))], "cannot be read"),
    ([raw(("ask", 0, 1.5))], "cannot be read"),
    ([raw(("more", 0, ASKED))], "cannot be read"),
    ([ask(0, 0)], "it has 0 bytes, and the ring 2048"),
    ([ask(0, 2049)], "it has 2049 bytes, and the ring 2048"),
    ([ask(0, FAR)], "can never fit into the staging memory"),
    ([ask(1, ASKED)], "too much space at once, or twice"),
    ([ask(0, ASKED), ask(0, ASKED)], "too much space at once, or twice"),
    ([ask(n, ASKED) for n in range(MOST + 1)], "too much space at once"),
    ([granted(0, 0)], "prefill says 'granted'"),
    ([written(0, None, tiles())], "prefill wrote where no space was granted"),
    ([ask(0, ASKED), written(1, None, tiles())], "prefill wrote where no space was granted"),
    ([ask(0, ASKED), written(0, None, tiles()), written(0, None, tiles())], "prefill wrote where no space was granted"),
    ([ask(0, 2048), ask(1, 2048), written(1, None, tiles())], "prefill wrote where no space was granted"),
    ([ask(0, ASKED), written(0, None, [])], "64 bytes asked for, 0 written"),
    ([ask(0, ASKED), written(0, None, tiles(0, 2))], "64 bytes asked for, 128 written"),
    ([ask(0, ASKED), written(0, (1, 2), tiles())], "what is not due"),
    ([ask(0, ASKED), written(0, (7, 9), tiles())], "what is not due"),
    ([ask(0, ASKED), written(0, (-(1 << 62), 1 << 62), tiles(4, 5))], "what is not due"),
    ([ask(0, ASKED), written(0, None, tiles(group=1))], "what is not due"),
    ([ask(0, ASKED), written(0, None, tiles(4, 5))], "what is not due"),
    ([ask(0, ASKED), written(0, None, tiles(FAR - 1, FAR))], "what is not due"),
    ([ask(0, ASKED), written(0, None, tiles(buffers=(1, 5)))], "what is not due"),
    ([ask(0, ASKED), written(0, None, tiles(3, 7, (3, 4)))], "what is not due"),
    ([ask(0, ASKED), written(0, None, tiles(1, 0))], "64 bytes asked for, 0 written"),
    ([ask(0, ASKED), written(0, None, tiles(0, FAR) * 256)], "64 bytes asked for, "),
    ([ask(0, ASKED), raw(("written", 0, None, tiles() * 257))], "cannot be read"),
    ([ask(0, ASKED), raw(("written", 0, None, tiles(-1, 0)))], "cannot be read"),
    ([ask(0, ASKED), written(0, None, tiles(buffers=(0, 2)) * 2)], "what has come before"),
]


@pytest.mark.parametrize(("said", "text"), LIES)
def test_decode_believes_no_parcel_that_does_not_add_up(said: list[Any], text: str) -> None:
    """Each is an error of its room with a clear text; nothing is written, and all space comes back."""
    scene = Scene()
    hook = scene.receiver()
    scene.say(hook, *said[:-1])
    with pytest.raises(StatelinkError, match=text):
        scene.say(hook, said[-1])
    if not any(each[0] == "written" for each in said[:-1]):
        assert scene.untouched()
    scene.end(hook)


def test_decode_takes_no_piece_twice() -> None:
    """Twice the first page, and never the second: the bytes add up, and the room must not succeed."""
    scene = Scene()
    hook = scene.receiver()
    scene.say(hook, ask(0, ASKED), written(0, None, tiles()), ask(1, ASKED))
    with pytest.raises(RoomError, match="what has come before"):
        scene.say(hook, written(1, (0, 1), tiles(buffers=(0, 2)) + tiles(1, 2, (0, 2))))
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
        scene.say(hook, ask(0, ASKED))
        with pytest.raises(WireError, match="asked for"):
            scene.say(hook, written(0, None, tiles(0, 4) * 256))
    assert not worked_out
    scene.end(hook)


PLACES = [
    (b"\xc1nonsense", "cannot be read"),
    (raw((-1, 0, 64)), "cannot be read"),
    (raw((1 << 32, 0, 64)), "cannot be read"),
    (raw((1, 0, -64)), "cannot be read"),
    (raw((1, 0, 1 << 62)), "cannot be read"),
    (raw((1, -1, 64)), "64 bytes at -0x1"),
    (raw((1, (1 << 64) - 63, 64)), "64 bytes at 0xffffffffffffffc1"),
    (raw((1, 0)), "cannot be read"),
]


@pytest.mark.parametrize(("prepared", "text"), PLACES)
def test_prefill_takes_no_ring_that_cannot_be(prepared: bytes, text: str) -> None:
    scene = Scene()
    with pytest.raises(WireError, match=text):
        scene.staged.sender().open(scene.context, prepared)


@pytest.mark.parametrize("nbytes", [0, 1, GRANULE - 1])
def test_prefill_says_what_never_fits_into_the_others_ring(nbytes: int) -> None:
    scene = Scene()
    hook = scene.sender(nbytes)
    with pytest.raises(RoomError, match=f"{GRANULE} bytes cannot be divided, and a parcel has {nbytes} at most"):
        list(hook.blocks(scene.context, scene.move))
    scene.end(hook)


CREDITS: list[tuple[list[Any], str]] = [
    ([b"\x80"], "cannot be read"),
    ([raw(("granted", 0, -1))], "cannot be read"),
    ([raw(("granted", 0, 1 << 62))], "cannot be read"),
    ([ask(0, ASKED)], "decode says 'ask'"),
    ([written(0, None, [])], "decode says 'written'"),
    ([granted(4, 0)], "decode grants space that nobody asked for"),
    ([granted(FAR, FAR)], "decode grants space that nobody asked for"),
    ([granted(0, 0), granted(0, 256)], "decode grants space that nobody asked for"),
]


@pytest.mark.parametrize(("said", "text"), CREDITS)
def test_prefill_believes_no_credit_that_nobody_gave(said: list[Any], text: str) -> None:
    scene = Scene()
    hook = scene.sender()
    blocks = iter(hook.blocks(scene.context, scene.move))
    assert next(blocks) is None
    assert scene.context.said == [ask(n, ASKED) for n in range(4)]
    scene.say(hook, *said[:-1])
    with pytest.raises(WireError, match=text):
        scene.say(hook, said[-1])
    scene.end(hook)


@pytest.mark.parametrize("offset", [4096 - ASKED + 1, 4096, FAR])
def test_prefill_writes_nothing_beyond_the_others_ring(offset: int) -> None:
    scene = Scene()
    hook = scene.sender()
    blocks = iter(hook.blocks(scene.context, scene.move))
    next(blocks)
    scene.say(hook, granted(0, offset))
    with pytest.raises(WireError, match=f"64 bytes at {offset} of 4096"):
        next(blocks)
    scene.end(hook)


def test_a_credit_at_the_end_of_the_ring_is_used() -> None:
    scene = Scene()
    hook = scene.sender()
    blocks = iter(hook.blocks(scene.context, scene.move))
    next(blocks)
    scene.say(hook, granted(0, 4096 - ASKED))
    block = next(blocks)
    assert isinstance(block, Blocks)
    assert (int(block.target[0]), int(block.nbytes[0])) == ((1 << 40) + 4096 - ASKED, ASKED)
    assert next(blocks) is None
    assert scene.space()["in_use"] == ASKED, "it may still be read"
    scene.end(hook)


@pytest.mark.parametrize("end", [("abort",), ("abort", "released"), ("released",)])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_room_that_ends_while_space_is_on_its_way(side: str, end: tuple[str, ...]) -> None:
    """The ring has decided for two rooms at once; the other ends while the first is told."""
    scene = Scene()
    all_of_it, first, other = (Context(scene.expected, peer) for peer in ("x", "y", "z"))
    holder = scene.receiver(all_of_it)
    holder.message(all_of_it, raw(ask(0, scene.ring.nbytes)))
    hooks: list[Hook] = []
    for context in (first, other):
        hook: Hook = scene.receiver(context) if side == "decode" else scene.sender(context=context)
        if isinstance(hook, SendHook):
            next(iter(hook.blocks(context, scene.move)))
        hook.message(context, raw(ask(0, ASKED) if side == "decode" else granted(0, 0)))
        hooks.append(hook)
    assert scene.space()["waiting"] == 2
    first.told = lambda: [getattr(hooks[1], each)(other) for each in end]
    holder.released(all_of_it)
    assert first.woken or first.lent
    hooks[0].released(first)
    if "released" not in end:
        hooks[1].released(other)
    assert scene.space() == WHOLE
    assert not other.woken


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_room_that_has_ended_asks_for_nothing(side: str) -> None:
    scene = Scene()
    hook: Hook = scene.receiver() if side == "decode" else scene.sender()
    if isinstance(hook, SendHook):
        next(iter(hook.blocks(scene.context, scene.move)))
    scene.end(hook)
    scene.say(hook, ask(0, ASKED) if side == "decode" else granted(0, 0))
    assert scene.space() == WHOLE


def test_a_component_that_is_not_staged_hears_nothing() -> None:
    scene = Scene(block_seconds=0.0)
    hook = scene.staged.receiver()
    assert hook.prepare(scene.context) == b""
    with pytest.raises(WireError, match="'ask' of a component that is not staged"):
        scene.say(hook, ask(0, ASKED))
    scene.end(hook)
