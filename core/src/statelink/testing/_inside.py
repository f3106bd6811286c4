"""Functions that run in a worker. They call a backend as the core does. The first argument is always the host."""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from statelink.backend import Backend, BackendContext, Batch, Blocks, Fencing, Op, Outcome, Region, Transfer
from statelink.config import read_options
from statelink.registry import load_backend

from ._worker import Host, Hung, Opened, Unexpected

__all__ = ["Held", "Move", "kind_of"]

U64 = npt.NDArray[np.uint64]

SHARED = Path("/dev/shm")
"""The folder of named shared memory of all processes."""


class Move(NamedTuple):
    """Blocks to one peer, for one use of a room."""

    link: str
    peer: str
    op: Op
    blocks: Blocks
    room: int = 1
    generation: int = 1


class Held(NamedTuple):
    """The resources of a process.

    Attributes:
        threads: Number of threads, also of native libraries.
        files: Number of open file descriptors.
        resident: Bytes of memory.
        shared: Files of shared memory of the whole machine.
    """

    threads: int
    files: int
    resident: int
    shared: frozenset[str]


@functools.cache
def kind_of(name: str) -> type[Backend]:
    """A backend's class. It is looked up once, because that reads the metadata of all packages."""
    return load_backend(name)


def address(host: Host) -> int:
    """The address of the worker's memory in the worker."""
    return host.address


def probe(host: Host, name: str, options: Mapping[str, Any]) -> tuple[bool, str, str]:
    """The backend's probe: whether it can run here, the reason, and a hint."""
    kind = kind_of(name)
    found = kind.probe(read_options(kind.Options, options, f"options of backend {name!r}"))
    return found.ok, found.reason, found.hint


def construct(host: Host, link: str, role: str, name: str, options: Mapping[str, Any]) -> None:
    """Make a backend."""
    kind = kind_of(name)
    settings = read_options(kind.Options, options, f"options of backend {name!r}")
    host.backends[link] = Opened(kind(BackendContext(options=settings, link=link, role=role)))


def open_backend(
    host: Host, link: str, role: str, name: str, options: Mapping[str, Any], regions: Sequence[Region]
) -> bytes:
    """Make a backend, and register memory. Returns its descriptor."""
    construct(host, link, role, name, options)
    register(host, link, regions)
    return descriptor(host, link)


def set_environment(host: Host, name: str, value: str) -> None:
    """Change this process's environment. An empty value removes the variable."""
    os.environ.pop(name, None)
    if value:
        os.environ[name] = value


def run(host: Host, link: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that takes a backend before its own arguments."""
    return function(host.backends[link].backend, *arguments)


def register(host: Host, link: str, regions: Sequence[Region]) -> None:
    """Make memory known to a backend."""
    host.backends[link].backend.register(regions)


def descriptor(host: Host, link: str) -> bytes:
    """What its peers get."""
    return host.backends[link].backend.descriptor()


def connect(host: Host, link: str, peer: str, raw: bytes, regions: Sequence[Region]) -> None:
    """Connect it to a peer."""
    host.backends[link].backend.connect(peer, raw, regions)


def disconnect(host: Host, link: str, peer: str) -> None:
    """Disconnect a peer. A ``submit`` to it may run on another thread."""
    with host.backends[link].turn:
        host.backends[link].backend.disconnect(peer)


def close(host: Host, link: str, times: int = 1) -> None:
    """Close a backend. It is kept, so that a test can call it again."""
    for _ in range(times):
        host.backends[link].backend.close()


def is_fencing(host: Host, link: str) -> bool:
    """Whether the backend implements both methods of a fence."""
    return isinstance(host.backends[link].backend, Fencing)


def grant(host: Host, link: str, peer: str, room: int, generation: int, addresses: U64, nbytes: U64) -> None:
    """Grant ranges to a peer."""
    fencing: Any = host.backends[link].backend
    fencing.grant(peer, room, generation, addresses, nbytes)


def revoke(host: Host, link: str, peer: str, room: int, generation: int, patience: float) -> Outcome:
    """Revoke a grant, and wait until that is done."""
    opened = host.backends[link]
    fencing: Any = opened.backend
    return opened.ended(fencing.revoke(peer, room, generation), patience)


def move(host: Host, each: Move, patience: float) -> list[Outcome]:
    """Move blocks as the core does, cut to the backend's limits, with at most as many transfers as it takes."""
    opened = host.backends[each.link]
    limits = opened.backend.capabilities
    waiting: list[Transfer] = []
    outcomes: list[Outcome] = []
    for piece in each.blocks.slices(limits.max_blocks, limits.max_bytes):
        while len(waiting) >= limits.max_transfers:
            outcomes.append(opened.ended(waiting.pop(0), patience))
        with opened.turn:
            waiting.append(opened.backend.submit(each.peer, Batch(each.op, piece, each.room, each.generation)))
    return outcomes + [opened.ended(transfer, patience) for transfer in waiting]


def submit_whole(host: Host, each: Move, patience: float) -> Outcome:
    """Submit a batch of any size as it is."""
    opened = host.backends[each.link]
    with opened.turn:
        transfer = opened.backend.submit(each.peer, Batch(each.op, each.blocks, each.room, each.generation))
    return opened.ended(transfer, patience)


def unpolled(host: Host, each: Move, patience: float) -> str:
    """Submit a batch, and wait for its outcome without a poll. Returns what is wrong, as a text; empty for nothing."""
    opened, told = host.backends[each.link], threading.Event()
    with opened.turn:
        transfer = opened.backend.submit(each.peer, Batch(each.op, each.blocks, each.room, each.generation))
    transfer.notify(told.set)
    if not told.wait(patience):
        return f"its outcome was not set within {patience:g} s although nothing polled it"
    outcome = transfer.outcome
    return "" if outcome is not None and outcome.ok else f"it failed: {outcome}"


def at_once(host: Host, moves: Sequence[Move], patience: float) -> list[list[Outcome]]:
    """Make several moves to different peers, each in a thread of its own."""
    outcomes: dict[int, list[Outcome]] = {}
    failures: list[BaseException] = []

    def work(number: int, each: Move) -> None:
        try:
            outcomes[number] = move(host, each, patience)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in enumerate(moves)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience)
    if failures:
        raise failures[0]
    if len(outcomes) < len(moves):
        raise Hung(f"moves to several peers at once did not end within {patience:g} s")
    return [outcomes[number] for number in range(len(moves))]


def early(
    host: Host, each: Move, rounds: int, source: tuple[str, int, int], target: tuple[str, U64], patience: float
) -> int:
    """Move one batch many times, with new bytes each time. Returns the rounds in which bytes were not there at its end.

    The source is overwritten as soon as a transfer has ended, as by an engine that uses its memory again.

    Args:
        host: This process.
        each: The batch.
        rounds: Number of rounds.
        source: Path of the memory that holds the source, and the first and last byte that are moved.
        target: Path of the memory that holds the target, and the offset of the last byte of each block.
        patience: Most seconds for one round.
    """
    opened, wrong = host.backends[each.link], 0
    from_, to = host.view(source[0])[source[1] : source[2]], host.view(target[0])
    ends = target[1].astype(np.int64)
    for number in range(rounds):
        value = number % 251 + 1
        from_[:] = value
        with opened.turn:
            transfer = opened.backend.submit(each.peer, Batch(each.op, each.blocks, each.room, each.generation))
        outcome = opened.ended(transfer, patience, rest=0.0)
        landed = to[ends]
        from_[:] = 0xFF
        if not outcome.ok:
            raise Unexpected(f"round {number} failed: {outcome.reason}")
        wrong += int((landed != value).any() or (to[ends] != value).any())
    return wrong


def pump(host: Host, each: Move, patience: float) -> tuple[int, str]:
    """Repeat a move until it fails. Returns how often it succeeded, and why it failed."""
    opened, rounds = host.backends[each.link], 0
    until = time.monotonic() + patience
    while time.monotonic() < until:
        try:
            outcomes = move(host, each, patience)
        except Unexpected:
            raise
        except Exception as error:
            return rounds, f"{type(error).__name__}: {error}"
        failed = [outcome for outcome in outcomes if not outcome.ok]
        if failed:
            return rounds, failed[0].reason
        rounds += 1
    raise Unexpected(
        f"{rounds} moves to {each.peer} went well, and none failed within {patience:g} s ({opened.backend})"
    )


def held(host: Host) -> Held:
    """The resources of this process, after garbage collection."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    shared = frozenset(os.listdir(SHARED)) if SHARED.is_dir() else frozenset()
    resident = pages * os.sysconf("SC_PAGE_SIZE")
    return Held(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), resident, shared)


def reconnect(host: Host, link: str, peer: str, raw: bytes, regions: Sequence[Region], times: int) -> None:
    """Connect and disconnect many times."""
    backend = host.backends[link].backend
    for _ in range(times):
        backend.disconnect(peer)
        backend.connect(peer, raw, regions)


def reopen(host: Host, name: str, options: Mapping[str, Any], regions: Sequence[Region], times: int) -> None:
    """Open and close a pair of backends many times: connected to each other if possible, otherwise one by one."""
    kind = kind_of(name)
    settings = read_options(kind.Options, options, f"options of backend {name!r}")
    tables = {"prefill": regions[:1], "decode": regions[1:]}

    def opened(role: str) -> Backend:
        backend = kind(BackendContext(options=settings, link=role, role=role))
        backend.register(tables[role])
        return backend

    for _ in range(times):
        if kind.capabilities.single_process and kind.capabilities.links_per_process != 1:
            one, other = opened("prefill"), opened("decode")
            one.connect("decode", other.descriptor(), tables["decode"])
            other.connect("prefill", one.descriptor(), tables["prefill"])
            one.close()
            other.close()
            continue
        for role in tables:
            opened(role).close()


def forget(host: Host, links: Sequence[str]) -> None:
    """Close backends, and forget them."""
    for link in links:
        opened = host.backends.pop(link, None)
        if opened is not None:
            opened.backend.close()


def rest(host: Host, seconds: float) -> None:
    """Let time pass, in which a wrong event can happen."""
    time.sleep(seconds)


def poll_nothing(host: Host, link: str) -> None:
    """Poll without a transfer."""
    host.backends[link].backend.poll([])
