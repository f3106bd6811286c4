"""Functions that run in a worker. They call a backend as the core does. The first argument is always the host."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from statelink.backend import (
    UNKNOWN,
    Backend,
    BackendContext,
    Batch,
    Blocks,
    Capabilities,
    Check,
    Fencing,
    Landing,
    Outcome,
    Probe,
    Region,
    Transfer,
)
from statelink.config import read_options
from statelink.errors import BackendError, StatelinkError
from statelink.registry import load_backend

from ._worker import Finding, Host, Hung, Opened, Unexpected, outcome_of, returning, transfer_of

__all__ = ["MOMENTS_SECONDS", "Held", "Move", "kind_of"]

U64 = npt.NDArray[np.uint64]

MOMENTS_SECONDS = 0.3
"""Seconds after which bytes that were not there count as never coming."""

PROBE = "Let `probe` never raise. If the backend cannot run here, return `Probe(ok=False, reason=...)`."

SWITCH_SECONDS = 0.00002
"""Seconds after which Python changes threads while moves run at once. Its own 5 ms hide what is not locked."""

TOO_MANY_BYTES = 1 << 40
"""Bytes of which no region of the kit has so many."""

SHARED = Path("/dev/shm")
"""The folder of named shared memory of all processes."""


LANDED = "when bytes have landed"


class Move(NamedTuple):
    """Blocks to one peer, for one use of a room."""

    link: str
    peer: str
    blocks: Blocks
    room: int = 1
    generation: int = 1


class Held(NamedTuple):
    """The resources of a process.

    Attributes:
        threads: Number of threads, also of native libraries.
        files: What each open file descriptor refers to, without the numbers of sockets and pipes.
        resident: Bytes of memory.
        shared: Files of shared memory of the whole machine.
    """

    threads: int
    files: tuple[str, ...]
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
    settings = read_options(kind.Options, options, f"options of backend {name!r}")
    try:
        found = kind.probe(settings)
    except (Exception, SystemExit) as error:
        raise Unexpected(f"`probe` raised {type(error).__name__}: {error}", PROBE) from error
    if not isinstance(found, Probe):
        raise Unexpected(f"`probe` returned an object of type {type(found).__name__}", PROBE)
    return found.ok, found.reason, found.hint


def optional(host: Host, name: str, options: Mapping[str, Any], regions: Sequence[Region]) -> list[str]:
    """Call each class method of an optional protocol that a backend has. Returns what is wrong, as texts."""
    kind: Any = kind_of(name)
    settings = read_options(kind.Options, options, f"options of backend {name!r}")
    wrong = []
    if hasattr(kind, "transports") != hasattr(kind, "transport"):
        wrong.append("it has one of `transports` and `transport`, and each needs the other")
    for method in ("transports", "memory_kinds", "diagnose", "raw"):
        if not hasattr(kind, method):
            continue
        if not isinstance(inspect.getattr_static(kind, method), classmethod | staticmethod):
            wrong.append(f"`{method}` is no class method")
            continue
        try:
            problem = _started_alone(kind, settings, regions) if method == "raw" else _answered(kind, method, settings)
        except (Exception, SystemExit) as error:
            problem = f"raised {type(error).__name__}: {error}"
        wrong += [f"`{method}` {problem}"] if problem else []
    return wrong


def _answered(kind: Any, method: str, settings: Any) -> str:
    """What is wrong with the answer of a class method that takes the options; empty for nothing."""
    answer = getattr(kind, method)(settings)
    what = Check if method == "diagnose" else str
    if not isinstance(answer, Sequence if method == "diagnose" else frozenset) or isinstance(answer, str):
        return f"returned an object of type {type(answer).__name__}"
    others = [type(each).__name__ for each in answer if not isinstance(each, what)]
    if others:
        return f"returned an object of type {others[0]} in its answer"
    more = sorted(answer - kind.capabilities.memory_kinds) if method == "memory_kinds" else []
    return f"returned {', '.join(more)}, which it does not declare" if more else ""


def _started_alone(kind: Any, settings: Any, regions: Sequence[Region]) -> str:
    """What is wrong with the library that a backend starts without a link; empty for nothing."""
    try:
        library = kind.raw("conformance", settings, "127.0.0.1", regions)
    except OSError:  # it may say that the library does not start
        return ""
    lacks = [each for each in ("address", "connect", "move", "close") if not callable(getattr(library, each, None))]
    if lacks:
        return f"returned an object of type {type(library).__name__}, which lacks {', '.join(lacks)}"
    library.close()
    library.close()
    return ""


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
    found: object = host.backends[link].backend.descriptor()
    if not isinstance(found, bytes):
        raise Unexpected(f"`descriptor` returned {found!r:.60}, and not bytes", "Return bytes from `descriptor`.")
    return found


def connect(host: Host, link: str, peer: str, raw: bytes, regions: Sequence[Region]) -> None:
    """Connect it to a peer."""
    host.backends[link].backend.connect(peer, raw, regions)


def disconnect(host: Host, link: str, peer: str) -> None:
    """Disconnect a peer. A ``submit`` to it may run on another thread."""
    with host.backends[link].turn, returning("disconnect"):
        host.backends[link].backend.disconnect(peer)


def close(host: Host, link: str, times: int = 1) -> None:
    """Close a backend. It is kept, so that a test can call it again."""
    for _ in range(times):
        with returning("close"):
            host.backends[link].backend.close()


def transport(host: Host, link: str, peer: str, options: Mapping[str, Any]) -> str:
    """What is wrong with the answer of ``transport`` for a peer that is connected, as a text; empty for nothing."""
    backend: Any = host.backends[link].backend
    try:
        told: object = backend.transport(peer)
    except (Exception, SystemExit) as error:
        return f"`transport` raised {type(error).__name__}: {error}"
    if not isinstance(told, str):
        return f"`transport` returned {told!r:.60}, and not a str"
    kind = type(backend)
    possible = kind.transports(read_options(kind.Options, options, f"options of backend {kind.name!r}"))
    if told == UNKNOWN or (told and not possible) or (possible and possible.issuperset(told.split("+"))):
        return ""
    return f"`transport` returned {told!r:.60}, and `transports` says {', '.join(sorted(possible)) or 'nothing'}"


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
    return opened.ended(transfer_of("revoke", fencing.revoke(peer, room, generation)), patience)


def is_landing(host: Host, link: str) -> bool:
    """Whether the backend tells its side when bytes have landed."""
    return isinstance(host.backends[link].backend, Landing)


def expect(host: Host, link: str, peer: str, room: int, generation: int, nbytes: int) -> None:
    """Ask the backend to say when so many bytes have landed."""
    calls: list[float] = []
    host.kept[LANDED] = calls
    landing: Any = host.backends[link].backend
    landing.when_landed(peer, room, generation, nbytes, lambda: calls.append(time.monotonic()))


def told(host: Host, link: str, within: float) -> int:
    """How often it has said so. Waits for the first time, for at most so many seconds."""
    until = time.monotonic() + within
    while not host.kept[LANDED] and time.monotonic() < until:
        time.sleep(0.001)
    return len(host.kept[LANDED])


def pieces(blocks: Blocks, limits: Capabilities) -> Iterator[Blocks]:
    """Cut blocks to the limits of a backend as the core does. A block that fits no memory stays whole: it is refused.

    The core finds such a block before it cuts.
    """
    fits = blocks.nbytes.max(initial=0) < TOO_MANY_BYTES
    return (blocks.pieces if fits else blocks.slices)(limits.max_blocks, limits.max_bytes)


def move(host: Host, each: Move, patience: float) -> list[Outcome]:
    """Move blocks as the core does, cut to the backend's limits, with at most as many transfers as it takes.

    Whatever is submitted has to end, and to give a reason if it fails, also where the backend refuses what follows.
    """
    opened = host.backends[each.link]
    limits = opened.backend.capabilities
    waiting: list[Transfer] = []
    outcomes: list[Outcome] = []
    try:
        for piece in pieces(each.blocks, limits):
            while len(waiting) >= limits.max_transfers:
                outcomes.append(opened.ended(waiting.pop(0), patience))
            waiting.append(opened.submit(each.peer, Batch(piece, each.room, each.generation)))
    except StatelinkError:
        for transfer in waiting:
            opened.ended(transfer, patience)
        raise
    return outcomes + [opened.ended(transfer, patience) for transfer in waiting]


def submit_whole(host: Host, each: Move, patience: float) -> Outcome:
    """Submit a batch of any size as it is."""
    opened = host.backends[each.link]
    transfer = opened.submit(each.peer, Batch(each.blocks, each.room, each.generation))
    return opened.ended(transfer, patience)


def unpolled(host: Host, each: Move, patience: float) -> str:
    """Submit a batch, and wait for its outcome without a poll. Returns what is wrong, as a text; empty for nothing."""
    opened, told = host.backends[each.link], threading.Event()
    transfer = opened.submit(each.peer, Batch(each.blocks, each.room, each.generation))
    transfer.notify(told.set)
    if not told.wait(patience):
        return f"its outcome was not set within {patience:g} s although nothing polled it"
    outcome = outcome_of(transfer)
    return "" if outcome.ok else f"it failed: {outcome}"


def at_once(host: Host, moves: Sequence[Move], blocks: int, patience: float) -> list[list[Outcome]]:
    """Make several moves to different peers, each in a thread of its own, in batches of so many ``blocks``.

    The threads begin together, and change often, so that a call meets calls for the other peers.
    """
    outcomes: dict[int, list[Outcome]] = {}
    failures: list[BaseException] = []
    begin = threading.Barrier(len(moves))

    def work(number: int, each: Move) -> None:
        try:
            begin.wait(patience)
            outcomes[number] = [
                outcome
                for first in range(0, each.blocks.count, blocks)
                for outcome in move(host, each._replace(blocks=each.blocks[first : first + blocks]), patience)
            ]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in enumerate(moves)]
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patience)
    finally:
        sys.setswitchinterval(usual)
    if failures:
        raise failures[0]
    if len(outcomes) < len(moves):
        raise Hung(f"moves to several peers at once did not end within {patience:g} s")
    return [outcomes[number] for number in range(len(moves))]


def early(
    host: Host, each: Move, rounds: int, source: tuple[str, int, int], target: tuple[str, U64], patience: float
) -> tuple[int, bool]:
    """Move one batch many times, with new bytes each time. The source is overwritten as soon as its bytes have arrived.

    Returns the rounds in which bytes were not there at the end of the transfer, and whether they came afterwards. If
    they did not, no more rounds follow.

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
        transfer = opened.submit(each.peer, Batch(each.blocks, each.room, each.generation))
        outcome = opened.ended(transfer, patience, rest=0.0)
        landed = bool((to[ends] == value).all())
        if not outcome.ok:
            raise Finding(f"round {number} failed: {outcome.reason}", "Move the batch, or mend what the reason says.")
        until = time.monotonic() + MOMENTS_SECONDS
        while not (landed or (to[ends] == value).all()):
            if time.monotonic() > until:
                return number + 1, False
            time.sleep(0.001)
        from_[:] = 0xFF
        wrong += int(not landed or (to[ends] != value).any())
    return wrong, True


def pump(host: Host, each: Move, patience: float) -> tuple[int, str]:
    """Repeat a move until it fails. Returns how often it succeeded, and why it failed."""
    rounds, until = 0, time.monotonic() + patience
    while time.monotonic() < until:
        try:
            outcomes = move(host, each, patience)
        except (Unexpected, Finding):
            raise
        except Exception as error:
            return rounds, f"{type(error).__name__}: {error}"
        failed = [outcome for outcome in outcomes if not outcome.ok]
        if failed:
            return rounds, failed[0].reason
        rounds += 1
    raise Finding(f"{rounds} moves to this peer were reported done, and none failed within {patience:g} s")


def tried(host: Host, each: Move, patience: float) -> list[Outcome]:
    """Make a move that may be refused. Returns how its transfers ended; nothing if it was."""
    try:
        return move(host, each, patience)
    except BackendError:
        return []


def vain(host: Host, each: Move, times: int, patience: float) -> list[str]:
    """Repeat a move to a peer that is dead. Returns why each of them failed.

    Raises:
        Finding: One was reported done.
    """
    reasons = []
    for number in range(1, times + 1):
        try:
            outcomes = move(host, each, patience)
        except BackendError as error:
            reasons.append(str(error))
            continue
        if any(outcome.ok for outcome in outcomes):
            raise Finding(f"move {number} to a dead peer was reported done")
        reasons.append(outcomes[0].reason)
    return reasons


def held(host: Host) -> Held:
    """The resources of this process, after garbage collection."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    shared = frozenset(os.listdir(SHARED)) if SHARED.is_dir() else frozenset()
    resident = pages * os.sysconf("SC_PAGE_SIZE")
    return Held(len(os.listdir("/proc/self/task")), tuple(_targets()), resident, shared)


def _targets() -> Iterator[str]:
    """What each open file descriptor of this process refers to."""
    folder = Path("/proc/self/fd")
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # the one by which the folder is read
            yield re.sub(r":\[\d+\]$", "", os.readlink(folder / name))


def reconnect(host: Host, link: str, peer: str, raw: bytes, regions: Sequence[Region], times: int) -> None:
    """Connect and disconnect many times."""
    backend = host.backends[link].backend
    for _ in range(times):
        with returning("disconnect"):
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
            with returning("close"):
                opened.backend.close()


def rest(host: Host, seconds: float) -> None:
    """Let time pass, in which a wrong event can happen."""
    time.sleep(seconds)


def poll_nothing(host: Host, link: str) -> None:
    """Poll without a transfer."""
    host.backends[link].backend.poll([])
