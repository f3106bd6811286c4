"""Explore the model at random, for as many steps as asked.

    python -m tests.model.explore --steps 1000000 [--seed 1] [--staged]

A run is a few thousand steps of one world, and follows from its seed alone.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections import Counter

from .rings import RINGS
from .shape import Faults, Shape
from .threads import Defect
from .world import World, running

__all__ = ["STAGED", "explore", "run"]

ROOMS = 4
STAGED = (("kv", "mamba"), ("kv", "mamba"), ("kv",))
"""Components that go through rings, where some do."""
SLOW = (0.0, 0.7, 0.9)
"""How slow a library is then: so that rooms fail while it is at work."""
CALM = Faults()
HARSH = Faults(transfer=0.02, submit=0.02, connect=0.08, stuck=0.15, stray=0.04)
WILD = HARSH._replace(drop=0.03, repeat=0.1, reorder=0.1)


def run(
    seed: int,
    steps: int = 2000,
    *,
    staged: bool = False,
    reuse: str = "",
    both: bool = False,
    takes_back: bool = False,
    crowded: bool = False,
    directory: bool = False,
    mixed: bool = False,
) -> World:
    """One world from its beginning to its end.

    Args:
        seed: Chooses.
        steps: How many are taken before everything has to come to its end.
        staged: Force components through rings.
        reuse: How ids are used again, if it matters. Where uses are counted, no process is killed, stopped or put on
            another clock: nothing could tell what it never took up.
        both: Let every process send and receive.
        takes_back: Let engines and operators take memory of failed rooms back before there is proof; for staged
            components.
        directory: Let a directory say where an instance is.
        mixed: Let engines state which request a room is for, and a router mix some of them up.
        crowded: Let many small requests go at once, over a library whose batches may carry several of them.

    Raises:
        Defect: A rule of the lifecycle is broken.
    """
    rng = random.Random(seed)
    shape = Shape(rng.randint(1, 2), rng.randint(1, 2), rng.random() < 0.5)
    shape = shape._replace(reuse=reuse or rng.choice(("", "stated")), both=both)
    shape = shape._replace(directory=directory, mixed=mixed)
    shape = shape._replace(owner_fence=shape.owner_fence and not crowded)
    shape = shape._replace(prompt=shape.owner_fence and rng.random() < 0.5)
    if staged:
        components = STAGED[0] if takes_back else rng.choice(STAGED)
        shape = shape._replace(staged=components, ring=rng.choice(RINGS), takes_back=takes_back)
    faults = rng.choice([CALM, HARSH, WILD])
    if staged:
        faults = faults._replace(slow=rng.choice(SLOW))
    world = World(shape, rng, faults)
    deadly = rng.random() < 0.7 and reuse != "counted"
    for _ in range(steps):
        act(world, rng, deadly)
        if staged:
            crowd(world, rng, 6, 12)
        if crowded:
            crowd(world, rng, 1, 4)
        if shape.reuse:
            hurry(world, rng)
        if shape.takes_back:
            take_back(world, rng)
        world.step()
    world.settle()
    return world


def direction(world: World, rng: random.Random) -> int:
    """Which way a request goes: the sign of its key."""
    return rng.choice((1, -1)) if world.shape.both else 1


def act(world: World, rng: random.Random, deadly: bool) -> None:
    """What engines, routers and fate do between two steps."""
    for each in world.requests[-6:] if world.shape.staged else world.requests[-3:]:
        if rng.random() < 0.2:
            process = rng.choice(world.places)
            if process.alive:
                world.advance(each, process)
    chance = rng.random()
    if chance < 0.01:
        world.open(direction(world, rng) * rng.randint(1, ROOMS), rng.randint(1, 12))
    elif chance < 0.012:
        process = rng.choice(world.places)
        if process.alive and not process.paused and process.held:
            world.counts["aborted"] += 1
            rng.choice(list(process.held.values())).handle.abort()
    elif chance < 0.015:
        world.restart(rng.choice(world.places), "another" if deadly and rng.random() < 0.25 else "")
    elif chance < 0.02:
        for process in world.places:
            process.paused = False
    elif chance < 0.025:
        world.network.cut.clear()
    elif deadly and chance < 0.0275:
        strangers = [each for each in world.places if each.model]
        world.kill(rng.choice(strangers or world.places))
    elif deadly and chance < 0.0290:
        process = rng.choice(world.places)
        process.paused = process.alive and not process.paused
        world.counts["paused"] += process.paused
    elif deadly and chance < 0.0295:
        world.counts["jumped"] += 1
        if rng.random() < 0.5:
            world.time += rng.random() * 5
        else:
            rng.choice(world.places).skew += rng.random() * 5
    elif deadly and chance < 0.03:
        world.network.cut.add(rng.choice(world.places).address)
        world.counts["cut"] += 1
    elif 0.03 <= chance < 0.07:
        world.keep(rng.choice(world.requests[-3:] or [None]), rng.choice(world.places))


def crowd(world: World, rng: random.Random, least: int, most: int) -> None:
    """More rooms of so many tokens at once, and more of them given up."""
    chance = rng.random()
    if chance < 0.02:
        request = world.open(direction(world, rng) * rng.randint(1, 2 * ROOMS), rng.randint(least, most))
        if request is not None:
            for process in world.living():
                world.advance(request, process)
    elif chance < 0.025:
        process = rng.choice(world.places)
        if process.alive and not process.paused and process.held:
            world.counts["aborted"] += 1
            rng.choice(list(process.held.values())).handle.abort()


def hurry(world: World, rng: random.Random) -> None:
    """Ids are used again at once, for requests of one length, of which many are given up early and on one side."""
    chance = rng.random()
    if chance < 0.02:
        world.open(direction(world, rng) * rng.randint(1, ROOMS), 5)
    elif chance < 0.03:
        process = rng.choice(world.places)
        if process.alive and not process.paused and process.held:
            held = rng.choice(list(process.held.values()))
            if not held.pushed and not held.accepted:
                world.counts["aborted"] += 1
                held.handle.abort()


def take_back(world: World, rng: random.Random) -> None:
    """An engine takes memory back that is not proven to be quiet, unless the operator's option does."""
    if rng.random() < 0.05:
        process = rng.choice(world.places)
        waiting = [held for held in process.held.values() if held.ended is not None and not held.handle.quiesced]
        operator = process.context.config.take_back_after is not None
        if waiting and process.alive and not process.paused and not operator:
            rng.choice(waiting).handle.take_back()


def explore(steps: int, seed: int, *, staged: bool = False) -> Counter[str]:
    """Worlds one after the other, until so many steps were taken.

    Raises:
        Defect: A rule is broken; says by which seed.
    """
    counts: Counter[str] = Counter()
    for number in itertools.count(seed):
        try:
            world = run(number, staged=staged)
        except Exception as error:
            raise Defect(f"seed {number}: {error}") from error
        counts.update(world.counts)
        counts["worlds"] += 1
        if counts["steps"] >= steps:
            return counts
    raise AssertionError


def main() -> None:
    """Parse arguments, explore, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--staged", action="store_true", help="force components through rings")
    arguments = parser.parse_args()
    began = time.perf_counter()
    with running():
        counts = explore(arguments.steps, arguments.seed, staged=arguments.staged)
    for name, count in counts.most_common():
        print(f"{count:>10} {name}")
    print(f"{counts['steps'] / (time.perf_counter() - began):>10.0f} steps a second")


if __name__ == "__main__":
    main()
