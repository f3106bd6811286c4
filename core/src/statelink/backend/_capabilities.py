"""What a backend declares about itself, readable without a device."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

__all__ = ["ANY", "Capabilities", "Check", "Fence", "Op", "Probe", "Side", "SubmitMode", "Verdict"]

ANY: Final = frozenset({"*"})
"""As ``Capabilities.state_types``: every registered state type."""

MAX_STALLED: Final = 64


class Op(enum.Enum):
    """A one-sided operation."""

    WRITE = "write"
    """Local memory to a peer's memory."""
    READ = "read"
    """A peer's memory to local memory."""


class Verdict(enum.Enum):
    """What a diagnosis says of one thing."""

    OK = "ok"
    PROBLEM = "problem"
    NOT_APPLICABLE = "not applicable"


class Side(enum.Enum):
    """Which end of the data flow a piece of memory is at."""

    SOURCE = "source"
    TARGET = "target"


class SubmitMode(enum.Enum):
    """Whether ``submit`` can block, as the worst case over the library's transports."""

    ASYNC = "async"
    BLOCKING = "blocking"


class Fence(enum.Enum):
    """Who can prove that a transfer touches a side's memory no more, short of its completion."""

    OWNER = "owner"
    """The memory's owner can stop it alone; the backend implements `Fencing`."""
    MOVER = "mover"
    """Only the drain, or the proven end, of the process that moves the bytes."""
    NONE = "none"
    """Nobody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """A backend's declaration. What is not declared is refused by the core before the backend is called.

    Attributes:
        memory_kinds: Kinds of memory it can register, without device numbers: ``dram``, ``cuda``, ``npu``, ...
        ops: Operations it offers.
        submit_mode: Whether ``submit`` can block.
        fences: Per operation and side, who can stop it; every pair of an offered operation is stated.
        state_types: State types that it moves; `ANY`, or a set of names.
        max_blocks: Most blocks in one ``submit``; the core cuts larger batches.
        max_bytes: Most bytes in one ``submit``; the core cuts larger batches, and larger blocks down to a MiB.
        max_transfers: Most transfers to one peer that are submitted and not finished.
        thread_safe: Whether calls may come from several threads at once. If not, the core serialises them all.
        stalled_peers: For a ``submit`` that can block: how many peers may each keep one waiting while those to others
            go on. The core has a thread for each of them. 0, where one such call keeps all others, or nobody knows;
            ``None``, where no call waits for a peer, as if ``submit`` were asynchronous.
        single_process: Whether two links in one process can reach each other.
        priority: Which of several backends that can run here ``auto`` takes: the highest, and of equals the first by
            name. 0 is a last resort, 100 what needs hardware that nobody has by accident.
        links_per_process: Most links of one process that are open at once, for a library that cannot start again while
            it runs; the core refuses one more. ``None`` where there is no such limit.
        block_seconds: What one more block of a batch costs beside its bytes, as measured; 0.0 where nobody measured it.
            Staging is chosen by it.
        landing_seconds: Of a target fenced by `Fence.MOVER`: seconds for which its process has to have run after the
            mover's end, until nothing lands any more. What a kernel still held of a dead writer's arrives until then.
    """

    memory_kinds: frozenset[str]
    ops: frozenset[Op]
    submit_mode: SubmitMode
    fences: Mapping[tuple[Op, Side], Fence]
    state_types: frozenset[str] = ANY
    max_blocks: int = 16384
    max_bytes: int = 64 << 20
    max_transfers: int = 1
    thread_safe: bool = False
    stalled_peers: int | None = 0
    single_process: bool = True
    priority: int = 10
    links_per_process: int | None = None
    block_seconds: float = 0.0
    landing_seconds: float = 1.0

    def __post_init__(self) -> None:
        stated = {(op, side) for op in self.ops for side in Side}
        if set(self.fences) != stated:
            raise ValueError(f"fences are stated for {set(self.fences)}, and needed for {stated}")
        links = 1 if self.links_per_process is None else self.links_per_process
        if min(self.max_blocks, self.max_bytes, self.max_transfers, links) < 1:
            raise ValueError("limits of a backend are at least 1")
        if self.stalled_peers is not None and not 0 <= self.stalled_peers <= MAX_STALLED:
            raise ValueError(f"between 0 and {MAX_STALLED} peers can be stalled, each with a thread of its own")
        if self.stalled_peers != 0 and not self.thread_safe:
            raise ValueError("where calls are serialised, a call that waits for one peer keeps all others")
        if not 0 <= self.block_seconds < 1:
            raise ValueError("a block costs between 0 and 1 seconds")
        if not 0 <= self.landing_seconds <= 60:
            raise ValueError("what a dead writer left lands within 0 to 60 seconds")

    @property
    def most_stalled(self) -> int | None:
        """Peers that may be stopped at once without delaying what goes to others; ``None`` for any number."""
        if not self.thread_safe:
            return 0
        return None if self.submit_mode is SubmitMode.ASYNC else self.stalled_peers

    def moves(self, state_type: str) -> bool:
        """Whether it declares this state type."""
        return self.state_types == ANY or state_type in self.state_types


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Whether a backend can run on this machine.

    Attributes:
        ok: Whether it can.
        reason: If not: exactly why. If so: what it found, in a few words.
        hint: What to do about it.
        details: Versions, devices and paths found.
    """

    ok: bool
    reason: str
    hint: str = ""
    details: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of a diagnosis.

    Attributes:
        what: What was looked at, in a few words, such as ``libibverbs.so.1``.
        verdict: How it stands.
        found: What was found; for a problem: exactly what is wrong.
        hint: What to do about a problem.
    """

    what: str
    verdict: Verdict
    found: str
    hint: str = ""
