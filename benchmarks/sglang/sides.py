"""What runs in the processes of both sides: the scheduler's part of each request, over whatever connector is there."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from support.sides import announcing

from . import workloads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.process import Host
    from support.rank import Rank

FAILED, _, WAITING, _, SUCCESS = range(5)
PAUSE, REST = 50e-6, 1e-3
BETWEEN = 0.01
"""Seconds before each small request of a mix."""


class Played(NamedTuple):
    """What one side measured.

    Attributes:
        seconds: From the first request's arrival to the last one's success.
        cpu: Seconds of CPU of the whole process.
        each: Seconds of each request, from its arrival to its success.
        calls: Seconds that the scheduler's thread spent in the connector's calls.
        turns: How often the scheduler's loop came round.
    """

    seconds: float
    cpu: float
    each: list[float]
    calls: float
    turns: int


def set_interval(host: Host, seconds: float) -> None:
    """Set the interpreter's switch interval of this process."""
    sys.setswitchinterval(seconds)


def prepare(host: Host, key: str, name: str, in_flight: int) -> None:
    """Fill the memory, and lay out the requests."""
    rank: Any = host.ranks[key]
    rank.workload, rank.kinds = name, [each.value for each in rank.made.kv_args.state_types]
    counts = {part: min(map(len, rank.buffers(part))) for part in rank.parts}
    rank.slots = {role: workloads.slots(name, role, rank.kinds, in_flight, counts) for role in ("prefill", "decode")}
    for part in rank.parts:
        for number, buffer in enumerate(rank.buffers(part)):
            buffer[:] = workloads.source(part, number, buffer.shape) if host.role == "prefill" else workloads.FILL
    if host.role == "decode":
        rank.meet()


def check(host: Host, key: str) -> tuple[int, int]:
    """Decode: items that are wrong, and items that changed although no request has them."""
    rank: Any = host.ranks[key]
    wrong = stray = 0
    for part in rank.parts:
        sent, named = (
            np.concatenate([each.items(part, rank.kinds) for each in rank.slots[role]])
            for role in ("prefill", "decode")
        )
        for number, buffer in enumerate(rank.buffers(part)):
            expected = workloads.source(part, number, buffer.shape)
            wrong += int(np.count_nonzero((buffer[named] != expected[sent]).any(axis=1)))
            others = np.setdiff1d(np.arange(len(buffer)), named)
            stray += int(np.count_nonzero((buffer[others] != workloads.FILL).any(axis=1)))
    return wrong, stray


class _Live:
    """A request under way. `step` is what SGLang's queues do with it in one iteration of the scheduler."""

    def __init__(self, rank: Rank, role: str, room: int, number: int) -> None:
        given: Any = rank
        self.number, self.began = number, time.perf_counter()
        self._slot, self._told = given.slots[role][number], False
        self._tokens = len(self._slot.pages) * workloads.PAGE
        classes: Any = given.classes
        with announcing(room, self._tokens):
            if role == "prefill":
                self._transfer = classes.sender(given.manager, given.address, room)
            else:
                self._transfer = classes.receiver(given.manager, given.address, room)
                self._transfer.init(0)
        self._prefill = role == "prefill"

    def step(self) -> bool:
        """Whether it has ended."""
        status = self._transfer.poll()
        if status == FAILED:
            self._transfer.failure_exception()
        if not self._told and status >= WAITING:
            self._told = True
            slot = self._slot
            if self._prefill:
                self._transfer.pop_decode_prefix_len()
                self._transfer.init(len(slot.pages), slot.row)
                self._transfer.send(slot.pages, slot.states, num_kv_tokens=self._tokens)
            else:
                self._transfer.send_metadata(slot.pages, slot.row, slot.states, decode_prefix_len=0)
            return False
        if status == SUCCESS and self._told:
            self._transfer.clear()
            return True
        return False


def play(host: Host, key: str, at: float, first: int, rooms: int, in_flight: int, work: int = 0) -> Played:
    """Play so many requests, at most ``in_flight`` at once.

    Args:
        host: This process.
        key: The rank.
        at: When to begin, as `time.monotonic` counts: on both sides at once.
        first: The first room.
        rooms: How many.
        in_flight: How many at once.
        work: Iterations of `_work` in each turn of the loop; with 0, the loop only rests a little.
    """
    rank, role = host.ranks[key], host.role
    free, live, each = set(range(in_flight)), list[_Live](), list[float]()
    following, last = first, first + rooms
    calls, turns = 0.0, 0
    _until(at)
    began, cpu = time.perf_counter(), time.process_time()
    while len(each) < rooms:
        turns += 1
        called = time.perf_counter()
        # Both sides give a request the same number, in whatever order requests end on each.
        while following < last and (number := (following - first) % in_flight) in free:
            free.remove(number)
            live.append(_Live(rank, role, following, number))
            following += 1
        for request in list(live):
            if request.step():
                each.append(time.perf_counter() - request.began)
                live.remove(request)
                free.add(request.number)
        calls += time.perf_counter() - called
        if work:
            _turn(work)
        else:
            time.sleep(PAUSE)
    seconds = time.perf_counter() - began
    return Played(seconds, time.process_time() - cpu, each, calls, turns)


def mix(host: Host, key: str, at: float, first: int, counts: Sequence[int]) -> list[list[tuple[float, float]]]:
    """Play requests of every slot at once: in each slot so many, one after the other. The last slot has the small ones.

    Args:
        host: This process.
        key: The rank.
        at: When to begin, as `time.monotonic` counts: on both sides at once.
        first: The first room.
        counts: How many, for each slot.

    Returns:
        For each slot, when each request began and ended.
    """
    rank, role, last = host.ranks[key], host.role, len(counts) - 1
    # Decode alone rests: prefill has each room open by then.
    pause = [BETWEEN if role == "decode" and slot == last else 0.0 for slot in range(len(counts))]
    live = dict[int, _Live]()
    played: list[list[tuple[float, float]]] = [[] for _ in counts]
    _until(at)
    due = [time.perf_counter() + each for each in pause]
    while any(len(each) < count for each, count in zip(played, counts, strict=True)):
        for slot, count in enumerate(counts):
            if slot in live:
                if live[slot].step():
                    ended = time.perf_counter()
                    played[slot].append((live.pop(slot).began, ended))
                    due[slot] = ended + pause[slot]
            elif len(played[slot]) < count and time.perf_counter() >= due[slot]:
                live[slot] = _Live(rank, role, first + len(played[slot]) * len(counts) + slot, slot)
        time.sleep(PAUSE)
    return played


def _until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic() - 0.001))
    while time.monotonic() < moment:
        pass


def _work(iterations: int) -> int:
    """What a scheduler does besides: Python, all the time."""
    found = 0
    for number in range(iterations):
        found += number & 3
    return found


def _turn(work: int) -> None:
    """A turn of a scheduler's loop, without the connector's calls."""
    _work(work)
    time.sleep(REST)


def iterations(host: Host, seconds: float) -> int:
    """How many iterations of `_work` take so long here."""
    began = time.perf_counter()
    _work(200_000)
    return int(200_000 * seconds / (time.perf_counter() - began))


def idle(host: Host, at: float, work: int, turns: int) -> float:
    """Seconds of a turn of the loop while no requests are there."""
    _until(at)
    began = time.perf_counter()
    for _ in range(turns):
        _turn(work)
    return (time.perf_counter() - began) / turns
