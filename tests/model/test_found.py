"""Defects, each told as a story: what was lost, late or said twice, and what must come of it."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from statelink.errors import MismatchError, TransferError
from statelink.link import Status
from statelink.link.decode import _attaching
from statelink.link.decode._part import plan_instance
from statelink.link.peers import InstanceState, RankState

from .explore import CALM
from .shape import Request, Shape
from .threads import SimExecutor, give_way
from .world import World, running

if TYPE_CHECKING:
    from statelink.link import Peer

    from .network import Frames
    from .process import Process


@pytest.fixture(autouse=True)
def model() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with running():
        yield
    logging.disable(logging.NOTSET)


def world_of(shape: Shape) -> tuple[World, Process, Process]:
    world = World(shape, random.Random(7), CALM)
    return world, world.living("prefill")[0], world.living("decode")[0]


def serve(world: World, request: Request | None) -> None:
    """Every engine does all that it has to do for a request."""
    assert request is not None
    for process in world.living():
        for _ in range(8):
            world.advance(request, process)


def ended(request: Request | None, *processes: Process) -> bool:
    assert request is not None
    return all(request.sides[process.address].ended is not None for process in processes)


def status(request: Request | None, process: Process) -> Status:
    assert request is not None
    return request.sides[process.address].handle.status


def test_a_part_that_was_lost_on_the_way_is_told_again() -> None:
    world, prefill, decode = world_of(Shape(1, 1, owner_fence=True))
    lost: list[Frames] = []

    def passes(frames: Frames) -> bool:
        if frames[0] == b"attach" and len(lost) < 2:
            lost.append(frames)
            return False
        return True

    world.passes = passes
    request = world.open(1, 5)
    serve(world, request)
    world.until(lambda: ended(request, prefill, decode))
    assert status(request, decode) is Status.SUCCEEDED
    assert len(lost) == 2


def test_a_request_that_was_told_untaken_is_not_taken_later() -> None:
    world, prefill, decode = world_of(Shape(1, 1, owner_fence=False))
    first = world.open(1, 2)
    serve(world, first)
    world.until(lambda: ended(first, prefill, decode))
    # Prefill gives decode up, of which decode knows nothing when it asks.
    decode.paused = True
    contacts = prefill.link._prefill._ranks._ranks  # type: ignore[union-attr]
    world.until(lambda: not contacts)
    decode.paused = False
    copies: list[Frames] = []

    def passes(frames: Frames) -> bool:
        if frames[0] == b"request":
            copies.append(frames)
        return frames[0] != b"ping"  # which would tell decode before it asks

    world.passes = passes
    second = world.open(2, 12)
    serve(world, second)
    world.until(lambda: ended(second, decode))
    assert status(second, decode) is Status.FAILED
    world.until(lambda: 2 not in decode.held)  # quiet: its memory is given to others
    assert len(copies) == 1
    third = world.open(3, 2)
    serve(world, third)
    world.until(lambda: any(each.state is RankState.ATTACHED for each in contacts.values()))
    connection = next(each for each in world.network.connections if each.address == prefill.address)
    connection.there.append(copies[0])
    world.settle()  # every byte that lands is looked at


def test_memory_of_a_refused_instance_does_not_stay_in_quarantine() -> None:
    world, prefill, decode = world_of(Shape(1, 1, owner_fence=False))
    request = world.open(1, 12)
    serve(world, request)
    world.until(lambda: status(request, decode) is Status.TRANSFERRING)
    prefill.paused = True
    world.until(lambda: ended(request, decode))
    instances = decode.link._decode._instances._instances  # type: ignore[union-attr]
    world.faults = CALM._replace(connect=1.0)
    prefill.paused = False
    world.until(lambda: [each.state for each in instances.values()] == [InstanceState.REFUSED])
    world.faults = CALM
    world.until(lambda: not decode.held)


def test_a_connection_that_comes_too_late_is_not_taken_for_the_next() -> None:
    world, prefill, decode = world_of(Shape(1, 1, owner_fence=True))
    request = world.open(1, 5)
    serve(world, request)
    instances = decode.link._decode._instances._instances  # type: ignore[union-attr]
    world.until(lambda: any(each.state is InstanceState.ATTACHING for each in instances.values()))
    world.kill(prefill)
    world.restart(prefill)
    source = next(iter(next(iter(instances.values())).ranks.values()))
    world.until(lambda: not source.connected and source.part is None)
    world.settle()


@pytest.mark.parametrize("fails", ["connect", "plan"])
def test_what_fails_too_late_does_not_refuse_the_next_process(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is lost while the library connects to it, or while its part is planned. Only then does that fail."""
    world, prefill, decode = world_of(Shape(1, 1, owner_fence=True))
    begun: list[bool] = []
    goes_on: list[bool] = []
    failed: list[bool] = []

    def first_fails(call: Callable[..., Any], error: Exception) -> Callable[..., Any]:
        def instead(*args: Any) -> Any:
            if begun:
                return call(*args)
            begun.append(True)
            while not goes_on:
                give_way()
            failed.append(True)
            raise error

        return instead

    if fails == "connect":
        monkeypatch.setattr(decode.backend, "connect", first_fails(decode.backend.connect, TransferError("too late")))
    else:
        plan = first_fails(plan_instance, MismatchError("too late"))
        monkeypatch.setattr(_attaching, "plan_instance", plan)
    first = world.open(1, 5)
    serve(world, first)
    world.until(lambda: bool(begun))
    world.kill(prefill)
    world.restart(prefill)
    second = world.living("prefill")[0]
    (instance,) = decode.link._decode._instances._instances.values()  # type: ignore[union-attr]
    ready = fails == "connect"  # a plan of the instance stands before the next one
    rank = next(iter(instance.ranks.values()))
    world.until(lambda: instance.state is InstanceState.READY if ready else rank not in instance.ranks.values())
    goes_on.append(True)
    world.until(lambda: bool(failed))
    third = world.open(2, 5)
    serve(world, third)
    world.until(lambda: ended(third, second, decode))
    assert status(third, decode) is Status.SUCCEEDED
    assert instance.reason is None
    world.settle()


def test_an_instance_that_is_never_found_is_forgotten_with_its_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks for it any more. The next room that names it looks anew."""
    world, prefill, decode = world_of(Shape(1, 1, owner_fence=True))
    looked: list[Peer] = []

    def resolve(peer: Peer) -> None:
        looked.append(peer)

    instances = decode.link._decode._instances._instances  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        patch.setattr(decode.context.rendezvous, "resolve", resolve)
        first = world.open(1, 5)
        serve(world, first)
        world.until(lambda: len(looked) > 2)
        assert first is not None
        first.sides[decode.address].handle.abort()
        world.until(lambda: not instances)
        looks = len(looked)
        later = world.time + 5
        world.until(lambda: world.time > later)
        assert len(looked) - looks <= 1, "one look-up may have been under way"
    second = world.open(2, 5)
    serve(world, second)
    world.until(lambda: ended(second, prefill, decode))
    assert status(second, decode) is Status.SUCCEEDED


@pytest.mark.parametrize("asked", [False, True])
def test_every_rank_of_decode_is_told_what_prefill_gave_up(asked: bool) -> None:
    """Also who asks after the first, and long after prefill has forgotten the room; and then the id is free again."""
    world, prefill, first = world_of(Shape(1, 2, owner_fence=True))
    second = world.living("decode")[1]
    request = world.open(1, 5)
    assert request is not None
    for process in (prefill, first, second):
        world.join(request, process)
    handles = [request.sides[process.address].handle for process in (prefill, first, second)]
    if asked:
        world.advance(request, first)
        world.until(lambda: prefill.link._prefill._requests.missing(handles[0]._state) == 1)  # type: ignore[arg-type, union-attr]
    handles[0].abort()
    world.until(lambda: ended(request, prefill))
    world.advance(request, first)
    world.until(lambda: ended(request, first))
    world.advance(request, second)
    world.until(lambda: ended(request, second))
    assert [each.reason.code for each in handles if each.reason] == ["room.aborted"] * 3
    world.until(lambda: not first.held and not second.held and not prefill.held)
    again = world.open(1, 5)
    for process in (second, first, prefill):
        for _ in range(8):
            world.advance(again, process)  # type: ignore[arg-type]
    world.until(lambda: ended(again, prefill, first, second))
    assert status(again, prefill) is Status.SUCCEEDED


def test_a_decode_that_comes_back_is_served_although_a_call_about_it_was_stuck() -> None:
    """It was given up while a submission to it was stuck in the library, and greeted again before that was over."""
    world, prefill, decode = world_of(Shape(1, 1, owner_fence=True))
    world.faults = CALM._replace(stuck=1.0)
    first = world.open(1, 12)
    serve(world, first)
    world.until(lambda: bool(prefill.backend.calls))
    world.faults = CALM
    executor = prefill.context.workers.moves
    assert isinstance(executor, SimExecutor)
    ((key, _),) = executor._stuck.items()
    executor._stuck[key] = world.time + 6.0
    decode.paused = True
    contacts = prefill.link._prefill._ranks._ranks  # type: ignore[union-attr]
    world.until(lambda: not contacts)
    decode.paused = False
    world.until(lambda: ended(first, prefill, decode))
    instances = decode.link._decode._instances._instances  # type: ignore[union-attr]
    world.until(lambda: all(each.state is not InstanceState.READY for each in instances.values()))
    second = world.open(2, 2)
    serve(world, second)
    world.until(lambda: decode.name in contacts)
    assert executor._stuck, "it is over already"
    world.until(lambda: ended(second, prefill, decode))
    assert status(second, decode) is Status.SUCCEEDED
    world.settle()
