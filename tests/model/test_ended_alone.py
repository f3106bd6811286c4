"""One side gives a use of an id up, and the other side never speaks of it. The next use waits in vain on no side."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from statelink.link import Status

from .explore import CALM
from .shape import Request, Shape
from .world import World, running

if TYPE_CHECKING:
    from .process import Process

SOON = World.DEADLINE / 4
"""Seconds of the world within which a side has to hear: far less than its room may take."""


@pytest.fixture(autouse=True)
def model() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with running():
        yield
    logging.disable(logging.NOTSET)


def take_up(world: World, request: Request, *processes: Process) -> None:
    """Engines do all that they have to do for a request."""
    for process in processes:
        for _ in range(8):
            world.advance(request, process)


def opened(world: World) -> Request:
    """A use of the id, of which no engine knows yet."""
    request = world.open(1, 5)
    assert request is not None
    return request


def codes(request: Request, *processes: Process) -> list[str]:
    """What processes were told; an empty text where the room has not failed."""
    reasons = (request.sides[process.address].handle.reason for process in processes)
    return ["" if reason is None else reason.code for reason in reasons]


def over(request: Request, *processes: Process) -> bool:
    return all(request.sides[process.address].ended is not None for process in processes)


def known(prefill: list[Process], what: str) -> bool:
    """Whether every rank of prefill keeps something of what decode said."""
    return all(each.link._prefill.load()[what] for each in prefill)  # type: ignore[union-attr]


def meet(world: World) -> None:
    """Both instances know each other: a use of another id has moved."""
    request = world.open(9, 5)
    assert request is not None
    take_up(world, request, *world.living())
    world.until(lambda: over(request, *world.living()))
    world.until(lambda: not any(each.held for each in world.living()))


def end_alone(world: World, side: list[Process], asks: bool) -> None:
    """A side gives a use up, after it asked for it or before, and the other side never speaks of it."""
    request = opened(world)
    for process in side:
        take_up(world, request, process) if asks else world.join(request, process)
    if asks and side[0].role == "decode":
        world.until(lambda: known(world.living("prefill"), "pending_requests"))
    for process in side:
        request.sides[process.address].handle.abort("its client left")
    world.until(lambda: over(request, *side) and not any(each.held for each in side))
    if side[0].role == "decode":
        world.until(lambda: known(world.living("prefill"), "gone"))


CASES = [(seed, asks) for seed in range(6) for asks in (False, True)]


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("alone", ["prefill", "decode"])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_both_sides_of_the_next_use_hear_at_once(ranks: tuple[int, int], alone: str, first: str) -> None:
    """Whoever gave the first use up, and whoever begins the second.

    In one case a room of prefill waits on: prefill gave a use up, and decode's request was told so. The room may be for
    decode's next request, because decode's last one may have been late.
    """
    for seed, asks in CASES:
        world = World(Shape(*ranks, owner_fence=True), random.Random(seed), CALM)
        meet(world)
        end_alone(world, world.living(alone), asks)
        if alone == "decode":
            use_after_decode_gave_up(world, prefill_first=first == "prefill")
        else:
            use_after_prefill_gave_up(world, prefill_first=first == "prefill")


def use_after_decode_gave_up(world: World, *, prefill_first: bool) -> None:
    prefill, decode = world.living("prefill"), world.living("decode")
    again = opened(world)
    if prefill_first:
        take_up(world, again, *prefill)
        world.until(lambda: over(again, *prefill), SOON)
        take_up(world, again, *decode)
    else:
        take_up(world, again, *decode)
        world.until(lambda: known(prefill, "pending_requests"))
        take_up(world, again, *prefill)
    world.until(lambda: over(again, *prefill, *decode), SOON)
    assert set(codes(again, *decode)) <= {"room.reused", "room.aborted"}
    if len(world.places) == 2:
        assert codes(again, *decode) == ["room.reused"]


def use_after_prefill_gave_up(world: World, *, prefill_first: bool) -> None:
    prefill, decode = world.living("prefill"), world.living("decode")
    again = opened(world)
    if prefill_first:
        take_up(world, again, *prefill)
        take_up(world, again, *decode)
        world.until(lambda: over(again, *decode), SOON)
        # What one rank of prefill is told, its engine tells the others.
        world.until(lambda: any(over(again, each) for each in prefill), SOON)
        assert set(codes(again, *prefill)) <= {"room.reused", ""}
        return
    take_up(world, again, *decode)
    world.until(lambda: over(again, *decode), SOON)
    take_up(world, again, *prefill)
    if len(world.places) == 2:
        world.until(lambda: not decode[0].held)
        late = Request(again.key, again.number, again.tokens)
        take_up(world, late, *decode)
        world.until(lambda: over(again, *prefill) and over(late, *decode), SOON)
        assert late.sides[decode[0].address].ended is Status.SUCCEEDED


def pair() -> tuple[World, Process, Process]:
    world = World(Shape(1, 1, owner_fence=True), random.Random(3), CALM)
    return world, world.living("prefill")[0], world.living("decode")[0]


def test_prefill_was_late_for_the_use_that_decode_gave_up() -> None:
    """Both sides make every use. A later one is served as soon as prefill opens its room before decode asks."""
    world, prefill, decode = pair()
    meet(world)
    end_alone(world, [decode], asks=True)
    late = opened(world)
    world.join(late, prefill)
    world.until(lambda: over(late, prefill), SOON)
    assert codes(late, prefill) == ["room.aborted"]
    again = opened(world)
    take_up(world, again, decode)  # decode asks first, so that nobody can tell whether prefill was late
    world.until(lambda: over(again, decode), SOON)
    world.join(again, prefill)
    world.until(lambda: over(again, prefill), SOON)
    assert codes(again, prefill, decode) == ["room.reused", "room.reused"]
    world.until(lambda: not prefill.held and not decode.held)
    last = opened(world)
    world.join(last, prefill)
    world.until(lambda: not prefill.loop.can_run())
    take_up(world, last, decode, prefill)
    world.until(lambda: over(last, prefill, decode))
    assert {held.ended for held in last.sides.values()} == {Status.SUCCEEDED}
    assert prefill.link._prefill.load()["gone"] == 0  # type: ignore[union-attr]


def test_both_sides_make_every_use_and_decode_asks_first() -> None:
    """Prefill was late for the use that decode gave up. The next one is served, although decode asks before prefill."""
    world, prefill, decode = pair()
    meet(world)
    end_alone(world, [decode], asks=True)
    late = opened(world)
    world.join(late, prefill)
    world.until(lambda: over(late, prefill), SOON)
    again = opened(world)
    take_up(world, again, decode)
    world.until(lambda: known([prefill], "pending_requests"))
    take_up(world, again, prefill)
    world.until(lambda: over(again, prefill, decode))
    assert {held.ended for held in again.sides.values()} == {Status.SUCCEEDED}


def test_prefill_hears_late_that_decode_gave_up() -> None:
    """Decode gave the first use up before the instances knew each other; prefill has the room of the second by then."""
    world, prefill, decode = pair()
    world.passes = lambda frames: frames[0] != b"hello"
    first = opened(world)
    world.join(first, decode)
    first.sides[decode.address].handle.abort("its client left")
    world.until(lambda: over(first, decode) and not decode.held)
    ended = world.time
    world.until(lambda: world.time > ended + 0.1)
    again = opened(world)
    world.join(again, prefill)
    world.passes = lambda frames: True
    world.until(lambda: over(again, prefill), SOON)
    take_up(world, again, decode)
    world.until(lambda: over(again, decode), SOON)
    assert codes(again, prefill, decode) == ["room.aborted", "room.reused"]


@pytest.mark.parametrize("opens", ["before", "after"])
def test_a_use_that_met_its_room_leaves_no_doubt(opens: str) -> None:
    """Prefill's room was there when decode gave up, or it was the next one: decode's next request waits for its own."""
    world, prefill, decode = pair()
    meet(world)
    first = opened(world)
    if opens == "before":
        world.join(first, prefill)
        world.until(lambda: prefill.held[1].handle._state.begun)  # type: ignore[union-attr]
        ended = world.time
        world.until(lambda: world.time > ended + 0.1)
    world.join(first, decode)
    first.sides[decode.address].handle.abort("its client left")
    world.until(lambda: over(first, decode) and not decode.held)
    if opens == "after":
        world.until(lambda: known([prefill], "gone"))
        world.join(first, prefill)
    world.until(lambda: over(first, prefill) and not prefill.held)
    again = opened(world)
    if opens == "after":
        world.join(again, prefill)
    take_up(world, again, decode)
    world.until(lambda: opens == "after" or known([prefill], "pending_requests"))
    take_up(world, again, prefill)
    world.until(lambda: over(again, prefill, decode))
    assert {held.ended for held in again.sides.values()} == {Status.SUCCEEDED}
