"""The lifecycle, explored: real links in a world where everything happens in any order and goes wrong in any way.

The world's own checks are the test: see `World.landing`, `Process.look`, `Process.verify` and `World.settle`.
"""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from statelink import wire
from statelink.link import Receiving, Sending, Status
from statelink.link._status import FOLLOWS
from statelink.link.peers import DECODE_RANK, INSTANCE, InstanceEvent, InstanceState, RankEvent, RankState
from statelink.plan import compile_pair

from .explore import CALM, STAGED, explore, run
from .process import PAGE, WIDTH
from .rings import PARCEL, RINGS
from .shape import Request, Shape
from .world import World, running

if TYPE_CHECKING:
    from .network import Connection
    from .process import Process

WORLDS = 54
"""Worlds of a few thousand steps each that every run of the tests explores."""
REUSED_WORLDS = 18
"""The same in which uses of ids are told apart by nothing but their order."""
BOTH_WORLDS = 12
MIXED_WORLDS = 24
JOINT_WORLDS = 26
DIRECTORY_WORLDS = 10
"""The same in which a directory says where an instance is, sometimes late."""
STAGED_WORLDS = 20
"""The same with components that go through rings of one to three parcels."""
RELEASED_WORLDS = 24
"""The same in which engines and operators take memory back before there is proof."""
RARE: set[tuple[object, object]] = {
    (InstanceState.RESOLVING, InstanceEvent.DROPPED),
    (InstanceState.GREETING, InstanceEvent.REFUSED),
    (InstanceState.READY, InstanceEvent.REFUSED),
    (InstanceState.REFUSED, InstanceEvent.RETRIED),
    (InstanceState.PLANNING, InstanceEvent.LOST),
    (RankState.ATTACHED, RankEvent.REFUSED),
    (RankState.ATTACHED, RankEvent.ASSIGNED),
    (RankState.ATTACHED, RankEvent.COMPILED),
    (RankState.ATTACHING, RankEvent.ASSIGNED),
    (RankState.ATTACHING, RankEvent.REFUSED),
    (RankState.ATTACHING, RankEvent.LOST),
    (Status.WAITING, Status.SUCCEEDED),
}
"""Steps that so few worlds may do without."""
SOAK = 1_000_000
"""Steps of the long run; the environment variable STATELINK_SOAK_STEPS asks for another number."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Refusals and losses are what these tests are about; a log of each would be long."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_worlds_keep_every_rule_and_take_every_step_of_the_tables() -> None:
    taken: Counter[tuple[object, object]] = Counter()
    counts: Counter[str] = Counter()
    with running(taken):
        for seed in range(WORLDS):
            counts.update(run(seed).counts)
        for seed in range(DIRECTORY_WORLDS):
            counts.update(run(seed, directory=True).counts)
    faults = ("killed", "restarted", "paused", "jumped", "cut", "dropped", "aborted", "stuck", "strays")
    for what in (*faults, "blocks", "kept", "settled early"):
        assert counts[what] > 20, f"{what} hardly ever happened"
    assert min(counts["decode succeeded"], counts["decode failed"]) > 100
    tables: list[dict[Any, dict[Any, Any]]] = [INSTANCE, DECODE_RANK]
    listed: set[tuple[object, object]] = set()
    for table in tables:
        listed.update((stage, event) for stage, steps in table.items() for event in steps)
    listed.update((a, b) for a in Status for b in FOLLOWS[a])
    assert set(taken) <= listed
    missing = listed - set(taken) - RARE
    assert not missing, f"never happened: {sorted(map(str, missing))}"


def test_no_byte_moves_between_different_requests_under_one_id() -> None:
    """The world compares what both engines state with every block that lands."""
    counts: Counter[str] = Counter()
    with running():
        for seed in range(MIXED_WORLDS):
            counts.update(run(seed, mixed=True).counts)
    assert counts["mixed"] > 50, counts
    for side in ("decode", "prefill"):
        assert counts[f"{side} room.content"] > 20, counts
        assert counts[f"{side} succeeded"] > 20, counts


@pytest.mark.parametrize(("seed", "staged"), [(2865481616, True)])
def test_worlds_in_which_a_rule_was_once_broken(seed: int, staged: bool) -> None:
    """A `Hello` came after prefill had lost the rank that sent it; the rank never attached again."""
    with running():
        run(seed, staged=staged)


@pytest.mark.parametrize("staged", [False, True])
def test_worlds_in_which_every_link_has_both_roles(staged: bool) -> None:
    """Requests go both ways at once, also under one id; each direction keeps every rule."""
    counts: Counter[str] = Counter()
    with running():
        for seed in range(BOTH_WORLDS):
            counts.update(run(seed, staged=staged, both=True).counts)
    for instance in ("decode", "prefill"):
        for way in ("sent", "received"):
            assert counts[f"{instance} {way}"] > 15, counts
        assert min(counts[f"{instance} succeeded"], counts[f"{instance} failed"]) > 20, counts
    assert counts["both ways"] > 20, "hardly an id was used in both directions at once"


def test_uses_of_an_id_that_nothing_tells_apart_never_meet_another() -> None:
    """Every rank takes up every use, at any time and with any loss of messages: see `REUSE`."""
    counts: Counter[str] = Counter()
    with running():
        for seed in range(REUSED_WORLDS):
            counts.update(run(seed, reuse="counted").counts)
    assert min(counts["decode succeeded"], counts["decode failed"]) > 100, counts
    for side in ("decode", "prefill"):
        assert counts[f"{side} room.reused"] > 20, counts


def test_worlds_in_which_rooms_share_batches() -> None:
    """A library gets small pushes of several rooms in one batch. Each still ends by itself, and keeps every rule."""
    counts: Counter[str] = Counter()
    with running():
        for seed in range(JOINT_WORLDS):
            counts.update(run(seed, crowded=True).counts)
    assert counts["joint"] > 20, "hardly a batch had several rooms"
    assert min(counts["decode succeeded"], counts["decode failed"]) > 100, counts


def test_worlds_in_which_staging_is_forced_on() -> None:
    """Rooms fail wherever staging may stand; no byte lands in space of somebody else's, and all of it comes back."""
    counts: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    with running(ends=ends):
        for seed in range(STAGED_WORLDS):
            counts.update(run(seed, staged=True).counts)
    for side in ("decode", "prefill"):
        assert min(counts[f"{side} succeeded"], counts[f"{side} failed"]) > 50, counts
    assert counts["staged blocks"] > 200
    for what in FAILED_WHILE:
        assert ends[what] > 3, f"hardly a room failed while {what}: {ends}"


def test_worlds_in_which_memory_is_taken_back_without_proof() -> None:
    """By an engine or by the operator's option. Ids are used again at once; space in rings is free on proof alone."""
    counts: Counter[str] = Counter()
    with running():
        for seed in range(RELEASED_WORLDS):
            counts.update(run(seed, staged=True, takes_back=True, reuse="stated").counts)
    for who in ("engine", "operator"):
        assert counts[f"taken back by the {who}"] > 20, counts
    assert min(counts["decode succeeded"], counts["decode failed"]) > 20, counts


FAILED_WHILE = (
    "prefill waits for space",
    "prefill has space on both sides",
    "prefill's space is read",
    "decode has nothing to lend",
    "decode's space is lent",
    "decode has scattered a part",
)


def calm(shape: Shape, seed: int) -> World:
    """A world in which nothing goes wrong, and everybody knows each other."""
    world = World(shape, random.Random(seed), CALM._replace(slow=0.5))
    world._check_serving()
    return world


@pytest.mark.parametrize("seed", range(3))
def test_rooms_that_share_a_ring_of_one_parcel_all_go_through(seed: int) -> None:
    """Two ranks on each side, each with space for one parcel: everybody waits for everybody, and nobody for ever."""
    with running():
        world = calm(Shape(2, 2, bool(seed % 2), STAGED[0], PARCEL), seed)
        requests = [opened(world, room, 6) for room in range(1, 8)]
        while not all(over(request, world) for request in requests):
            for request in requests:
                if not over(request, world):
                    serve(world, request)
            world.step()
        for request in requests:
            assert {held.ended for held in request.sides.values()} == {Status.SUCCEEDED}
            assert len(request.sides) == 4


@pytest.mark.parametrize("shape", [Shape(1, 2, True), Shape(2, 2, True), Shape(2, 1, False)])
def test_one_that_leaves_keeps_nobody_waiting(shape: Shape) -> None:
    """In whatever order the ranks take a request up that no other decode asks for: nobody runs into its deadline."""
    with running():
        for seed in range(60):
            world = calm(shape, seed)
            rng = random.Random(seed)
            request = opened(world, 1, 6)
            leaver = rng.choice(world.places)
            while not over(request, world):
                process = rng.choice(world.places)
                if rng.random() < 0.3:
                    (world.join if process is leaver else world.advance)(request, process)
                held = request.sides.get(leaver.address)
                if held is not None and rng.random() < 0.1:
                    held.handle.abort()
                world.step()
            said = [held.handle.reason for held in request.sides.values()]
            assert {each and each.code for each in said} == {"room.aborted"}, f"seed {seed}: {said}"
            world.settle()


class Stranger:
    """Somebody who introduced itself to every rank of prefill, and maybe was attached; its instance is not complete."""

    def __init__(self, world: World, attached: bool) -> None:
        self.paused = True  # it does not listen
        self.rng = world.rng
        decode = world.living("decode")[0]
        inventory = msgspec.structs.replace(decode.context.handshake.inventory, instance="strangers")
        card = msgspec.structs.replace(decode.context.handshake, link="stranger", inventory=inventory)
        instances = decode.link._decode._instances._instances  # type: ignore[union-attr]
        parts = {part.name: part for each in instances.values() for part in each.parts}
        self.lines: dict[str, Connection] = {}
        for prefill in world.living("prefill"):
            line = self.lines[prefill.name] = world.network.dial(self, prefill.address)  # type: ignore[arg-type]
            line.there.append(wire.encode(wire.Hello(sender="stranger", handshake=wire.write_handshake(card))))
            part = parts[prefill.name]
            if attached and part.part is not None:
                assignment = part.part.assignment
                plan = compile_pair(prefill.context.inventory, inventory, assignment)
                attach = wire.Attach(
                    sender="stranger",
                    to=prefill.name,
                    assignment=assignment,
                    destinations=part.part.readers + 1,
                    digest=plan.digest,
                )
                line.there.append(wire.encode(attach))

    def live(self) -> None:
        """Give a sign of life."""
        for name, line in self.lines.items():
            if not line.there:
                line.there.append(wire.encode(wire.Ping(sender="stranger", to=name)))

    def speak(self, room: int) -> None:
        """Ask for a room, or say anything else of it, except to give it up: that ends one that nobody asked for yet."""
        name = self.rng.choice(list(self.lines))
        use: Any = {"sender": "stranger", "to": name, "room": room, "generation": self.rng.randint(1, 20)}
        message = self.rng.choice(
            (
                wire.Request(**use, tokens=6, prefix=0),
                wire.Drained(**use, met=1),
                wire.Received(**use),
                wire.Note(**use, component="kv", payload=b""),
            )
        )
        self.lines[name].there.append(wire.encode(message))


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("shape", [Shape(1, 1, True), Shape(2, 2, True)])
def test_strangers_get_nobodys_room(shape: Shape, attached: bool) -> None:
    """Whatever they say of rooms, except that they give them up, before these are open and after: all succeed."""
    with running():
        for seed in range(8):
            world = calm(shape, seed)
            stranger = Stranger(world, attached)
            contacts = world.places[0].link._prefill._ranks  # type: ignore[union-attr]
            wanted = RankState.ATTACHED if attached else RankState.GREETED
            while (known := contacts.get("stranger")) is None or known.state is not wanted:
                stranger.live()
                world.step()
            requests = [opened(world, room, 6) for room in range(1, 5)]
            while not all(over(request, world) for request in requests):
                for request in requests:
                    if world.rng.random() < 0.1:
                        stranger.speak(request.room)
                    if world.rng.random() < 0.1 and not over(request, world):
                        serve(world, request)
                stranger.live()
                world.step()
            assert contacts.get("stranger") is known
            for request in requests:
                assert {held.ended for held in request.sides.values()} == {Status.SUCCEEDED}


@pytest.mark.parametrize("ring", RINGS[:2])
def test_a_large_room_does_not_starve_small_ones(ring: int) -> None:
    """Whoever asks later is, as a rule, served before the large one has had all of its turns."""
    served = 0
    with running():
        for seed in range(6):
            world = calm(Shape(1, 1, True, STAGED[0], ring), seed)
            prefill, decode = world.places
            large = opened(world, 1, 32)
            push_whole(prefill, large)
            while not staged(decode, 1):
                serve(world, large)
                world.step()
            small = opened(world, 2, 2)
            before = 0
            while small.sides.get(decode.address) is None or small.sides[decode.address].ended is None:
                before = staged(decode, 1)
                serve(world, small)
                world.step()
            assert small.sides[decode.address].ended is Status.SUCCEEDED
            assert before > 0
            served += before < 2 * WIDTH * large.tokens // 2
            world.settle()
    assert served >= 4, "the large one had all of its turns"


def opened(world: World, room: int, tokens: int) -> Request:
    """A request whose id nobody uses."""
    request = world.open(room, tokens)
    assert request is not None
    return request


def over(request: Request, world: World) -> bool:
    """Whether every engine has seen its end."""
    return sum(held.ended is not None for held in request.sides.values()) == len(world.places)


def serve(world: World, request: Request) -> None:
    """Every engine goes on with a request."""
    for process in world.living():
        world.advance(request, process)


def push_whole(prefill: Process, request: Request) -> None:
    """One push of everything, where an engine would make many."""
    prefill.world.join(request, prefill)
    held = prefill.held[request.key]
    assert prefill.take(held, request.tokens // PAGE)
    assert isinstance(held.handle, Sending)
    prefill.fill(held)
    held.chunks.append(len(held.pages))
    held.handle.push({"kv": held.pages, "mamba": [held.slot]}, last=True)
    held.pushed = request.tokens


def staged(decode: Process, room: int) -> int:
    """Bytes of a room's pages that have come through decode's ring."""
    held = decode.held.get(room)
    if held is None:
        return 0
    assert isinstance(held.handle, Receiving)
    hooks: list[Any] = [delivery.hooks["kv"] for delivery in held.handle._state._deliveries.values()]
    return sum(hook._nbytes for hook in hooks)


@pytest.mark.soak
@pytest.mark.parametrize("staged", [False, True])
def test_long_exploration(staged: bool) -> None:
    steps = int(os.environ.get("STATELINK_SOAK_STEPS", SOAK))
    with running():
        counts = explore(steps, seed=random.randrange(1 << 32), staged=staged)
    print("\n", dict(counts))
