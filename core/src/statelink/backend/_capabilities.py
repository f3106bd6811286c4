"""What a backend declares about itself, readable without a device."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

__all__ = ["ANY", "Capabilities", "Check", "Fence", "Probe", "Side", "SubmitMode", "Verdict"]

ANY: Final = frozenset({"*"})
"""A value of ``Capabilities.state_types``: every registered state type."""

MAX_STALLED: Final = 64


class Verdict(enum.Enum):
    """The result of one check of the machine."""

    OK = "ok"
    PROBLEM = "problem"
    NOT_APPLICABLE = "not applicable"


class Side(enum.Enum):
    """Whether memory is read (the source) or written (the target) by a transfer."""

    SOURCE = "source"
    TARGET = "target"


class SubmitMode(enum.Enum):
    """Whether ``submit`` can block. State the worst case over the library's transports."""

    ASYNC = "async"
    BLOCKING = "blocking"


class Fence(enum.Enum):
    """Who can prove that a transfer that did not complete has stopped touching one side's memory."""

    OWNER = "owner"
    """The memory's owner can stop the transfer alone: for the target, with the two methods of `Fencing`."""
    MOVER = "mover"
    """Only the process that moves the bytes: it says that it has drained, or it is proven to have ended."""
    NONE = "none"
    """Nobody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a backend declares about itself. The core refuses what is not declared before it calls the backend.

    Attributes:
        memory_kinds: Kinds of memory that it can register, without device numbers: ``dram``, ``cuda``, ``npu``, ...
        submit_mode: Whether ``submit`` can block.
        source: Who can prove that a transfer reads no more of the source's memory: `Fence.MOVER` or `Fence.NONE`.
        target: Who can prove that nothing more of a transfer lands in the target's memory.
        state_types: State types that it moves: `ANY`, or a set of names.
        max_blocks: Most blocks in one ``submit``. The core cuts larger batches.
        max_bytes: Most bytes in one ``submit``. The core cuts larger batches. It cuts blocks into pieces of at least 1
            MiB.
        max_transfers: Most transfers to one peer that are submitted and have not ended.
        thread_safe: Whether calls may come from several threads at once. If not, the core serialises them all.
        stalled_peers: For a ``submit`` that can block: how many calls may hang at once, each on a peer that does not
            answer, while the backend still serves other peers. The core has a thread for each of them. 0 if one such
            call holds all others, or if nobody knows. ``None`` if no call waits for a peer.
        single_process: Whether two links in one process can reach each other.
        priority: Of the backends that can run here, ``auto`` takes the one with the highest priority, and of equals
            the first by name. 0 is a last resort. 100 is for a backend that needs special hardware.
        links_per_process: Most links of one process that can be open at once, for a library that cannot start twice.
            The core refuses one more. ``None`` if there is no such limit.
        block_seconds: Measured cost of one more block in a batch, without its bytes; 0.0 if nobody measured it. The
            core decides about staging with it.
        both_roles: Whether one backend object can send to peers and receive from them, also from the same peer at the
            same time. If not, the core refuses a link of the role ``both``.
        ends_unpolled: Whether a thread of the backend or of its library sets the outcome of each transfer, so that no
            transfer has to be polled before it has ended. The core then waits without polling.
        prompt_bytes: Most bytes of a batch for which a ``submit`` that can block takes about as long as copying them,
            whatever the peer does, unless another call is under way. The core may then call it on the thread that must
            not block, which saves a request two changes of threads. 0 if there is no such bound.
        prompt_fences: Whether ``grant`` and ``revoke`` never block. The core may then call them on the thread that
            must not block, which saves a request a change of threads.
        joins_rooms: Whether one batch may carry blocks of several rooms. The core then gives small pushes of several
            rooms to one peer in one ``submit``, with the room and the generation 0, and all of them end as that batch
            does. Set it where a call costs much beside its bytes, and the backend does not need to know the room.
        landing_seconds: For a target with `Fence.MOVER`: after the mover's process has ended, bytes that a kernel still
            holds may land for this time. Only the time in which the target's process runs counts.
    """

    memory_kinds: frozenset[str]
    submit_mode: SubmitMode
    source: Fence
    target: Fence
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
    both_roles: bool = True
    ends_unpolled: bool = False
    prompt_bytes: int = 0
    prompt_fences: bool = False
    joins_rooms: bool = False
    landing_seconds: float = 1.0

    def __post_init__(self) -> None:
        for side in ("source", "target"):
            if not isinstance(getattr(self, side), Fence):
                raise ValueError(f"{side} is {getattr(self, side)!r}: it is a Fence")
        if self.source is Fence.OWNER:
            raise ValueError("source is Fence.OWNER: only a target has that fence, as grants are for what is written")
        for name in ("max_blocks", "max_bytes", "max_transfers", "links_per_process"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ValueError(f"{name} is at least 1, and not {limit}")
        if self.stalled_peers is not None and not 0 <= self.stalled_peers <= MAX_STALLED:
            said = f"stalled_peers is {self.stalled_peers}"
            raise ValueError(f"{said}: it is between 0 and {MAX_STALLED}, as each of them costs a thread, or None")
        if self.stalled_peers != 0 and not self.thread_safe:
            said = f"stalled_peers is {self.stalled_peers} and thread_safe is False"
            raise ValueError(f"{said}: calls are made one at a time then, so that one that waits for a peer delays all")
        if self.prompt_bytes < 0:
            raise ValueError(f"prompt_bytes is {self.prompt_bytes}: it is at least 0")
        if self.prompt_bytes and self.stalled_peers is not None:
            said = f"prompt_bytes is {self.prompt_bytes} and stalled_peers is {self.stalled_peers}"
            raise ValueError(
                f"{said}: a submit is prompt only where no call waits for a peer, so stalled_peers is None"
            )
        if self.joins_rooms and self.target is Fence.OWNER:
            said = "joins_rooms is True and target is Fence.OWNER"
            raise ValueError(f"{said}: an owner admits a batch by its room, so that a batch cannot carry several rooms")
        if not 0 <= self.priority <= 100:
            raise ValueError(f"priority is {self.priority}: it is between 0 and 100")
        if not 0 <= self.block_seconds < 1:
            raise ValueError(f"block_seconds is {self.block_seconds}: it is at least 0 and below 1")
        if not 0 <= self.landing_seconds <= 60:
            raise ValueError(f"landing_seconds is {self.landing_seconds}: it is between 0 and 60")

    @property
    def most_stalled(self) -> int | None:
        """How many peers may stall at once without delaying transfers to others; ``None`` for any number."""
        if not self.thread_safe:
            return 0
        return None if self.submit_mode is SubmitMode.ASYNC else self.stalled_peers

    def moves(self, state_type: str) -> bool:
        """Whether the backend declares this state type."""
        return self.state_types == ANY or state_type in self.state_types


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Whether a backend can run on this machine.

    Attributes:
        ok: Whether the backend can run here.
        reason: If it cannot: exactly why. If it can: what the probe found, in a few words.
        hint: What to do about it.
        details: Versions, devices and paths found.
    """

    ok: bool
    reason: str
    hint: str = ""
    details: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The result of one check, for ``statelink doctor``.

    Attributes:
        what: What was checked, in a few words, such as ``libibverbs.so.1``.
        verdict: The result.
        found: What was found. For a problem: exactly what is wrong.
        hint: What to do about a problem.
        code: Code of the error with which a link fails for it; empty for none.
    """

    what: str
    verdict: Verdict
    found: str
    hint: str = ""
    code: str = ""
