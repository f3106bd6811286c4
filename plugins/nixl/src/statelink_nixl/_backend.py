"""The backend: one NIXL agent for each link.

All calls to an agent are made under one lock. NIXL would serialise them itself, but inside the library, where a poll
would wait for another thread's copy. With this lock, a poll can return at once, and the thread that holds the lock
polls instead.

NIXL cannot cancel. If a handle is released while it is in progress, its bytes continue to move. If its remote agent is
removed, NIXL frees the handle twice. So the backend keeps a handle until it has ended, and a remote agent until its
last handle has ended. That holds after a disconnect, too.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from statelink.backend import (
    ANY,
    DIRECT,
    UNKNOWN,
    BackendContext,
    Batch,
    Capabilities,
    Check,
    Ends,
    Fence,
    Probe,
    RawLibrary,
    Region,
    Side,
    SubmitMode,
    Transfer,
    boot_id,
)
from statelink.backend.native import Ledger, Posted, PostingBackend, Remote, rdma_devices, unregistered
from statelink.errors import BackendUnavailableError, TransferError

from ._card import CARD_SCRATCH_BYTES, scratch_beside
from ._diagnosis import diagnose
from ._library import SCRATCH, Library
from ._options import Options
from ._raw import RawNixl
from ._tables import DRAM, VRAM, Descriptor, Part, Table, parts_of, place, row
from ._threads import Threads
from ._transport import CUDA, RDMA, TCP, leaves_out_cuda, possible, sent_over_tcp, told

__all__ = ["NixlBackend"]

GREETING = 64
"""Number of bytes of the first write to a peer."""

PROBES = 64
"""Number of writes of the whole scratch memory that find out the transport."""

PRINT = "with NIXL_LOG_LEVEL=INFO and UCX_LOG_LEVEL=info in the environment, NIXL and UCX print why"
"""A part of hints: NIXL's errors are names without a reason."""

MAX_KEPT = 256
"""Most transfers that are kept until the library ends them, although they failed or their peer is gone."""


Place = tuple[str, int, int]
"""NIXL's kind of memory, an address, and the device."""


class _Peer(Remote):
    """A remote agent that is loaded in the library."""

    __slots__ = ("greetings", "slow", "words")
    table: Table

    def __init__(self, name: str, table: Table) -> None:
        super().__init__(name, table)
        self.words: dict[tuple[str, str], str] = {}
        """The transport between each kind of memory here and each kind there."""
        self.slow = False
        """Whether bytes from or to a card may be copied through the host, piece by piece."""
        self.greetings: list[Posted[_Peer]] = []
        """The writes that let NIXL's threads connect to it. Nobody waits for them, unless it is connected again."""


class NixlBackend(PostingBackend[_Peer]):
    """Moves bytes with NIXL."""

    api_version = 1
    name = "nixl"
    Options = Options
    capabilities: ClassVar[Capabilities] = Capabilities(
        memory_kinds=frozenset({"dram", "cuda"}),
        state_types=ANY,
        # Between processes of one host, UCX copies inside the posting call.
        submit_mode=SubmitMode.BLOCKING,
        # Such a copy continues after its target has destroyed its agent, and a released handle continues over TCP.
        source=Fence.MOVER,
        target=Fence.MOVER,
        max_blocks=16384,
        max_bytes=64 << 20,
        max_transfers=32,
        thread_safe=True,
        stalled_peers=None,  # a post takes as long as the copy, also into a stopped process; it never waits for a peer
        single_process=True,
        priority=50,
        prompt_bytes=2 << 20,  # the posting call copies, which takes less than a millisecond
        joins_rooms=True,
        block_seconds=2e-6,  # one system call for each descriptor on one host; more over TCP
    )
    strategies: ClassVar = {"*": DIRECT}

    def __init__(self, context: BackendContext) -> None:
        options = context.options
        try:
            self._library = Library()
        except Exception as error:  # whatever its native modules raise
            reason, hint = _absent(error)
            raise BackendUnavailableError(reason, hint=hint, backend=self.name) from error
        self._link = context.link
        self._writes = context.role != "decode"
        self._require = context.require
        self._card_scratch, self._card = 0, 0
        """The address of bytes on a card that peers may overwrite, and the card; 0 if there are none."""
        self._timeout: float = options.connect_timeout
        # When NIXL says that a peer is disconnected, UCX has closed the connection by force and ended its operations.
        # If these are copies or sockets, nothing here reads their sources from then on, but what the kernel took before
        # may still land. For network cards, graphics cards and other backends this is not known.
        only_ucx = list(options.backends) == ["UCX"]
        closes = only_ucx and options.backends["UCX"].get("ucx_error_handling_mode") != "none"
        self._reads_end = closes and not rdma_devices()
        self._lock = threading.Lock()
        self._table = Table(())
        self._regions: Sequence[Region] = ()
        self._may, self._may_with_cards = possible(options), possible(options, card=True)
        self._without = leaves_out_cuda(options)
        """UCX's setting ``TLS``, if UCX cannot use memory of CUDA with it."""
        self._ledger: Ledger[_Peer] = Ledger(self.name, self._is_over, self._remove)
        try:
            reason, hint = self._library.lacks(options)
            if reason:
                raise BackendUnavailableError(reason, hint=hint, backend=self.name, library=self._library.version)
            self._agent: Any = self._library.agent(context.link, options)
            self._agent.register_memory(row(SCRATCH.ctypes.data, SCRATCH.nbytes), DRAM)
            self._threads = Threads(self._library, self._agent, context.link, options)
        except self._library.errors as error:
            refused = f"; where the host has an NVIDIA GPU, NIXL refuses TLS={self._without}: add cuda_copy to it"
            raise BackendUnavailableError(
                "NIXL could not be started",
                cause=str(error),
                hint=f"{PRINT}; see also `backends` and `ucx` in the options{refused if self._without else ''}",
                backend=self.name,
                library=self._library.version,
            ) from error

    @classmethod
    def raw(cls, name: str, options: Any, host: str, regions: Sequence[Region]) -> RawLibrary:
        """See `statelink.backend.RawTransfers`."""
        return RawNixl(name, options, regions)

    @classmethod
    def probe(cls, options: Any) -> Probe:
        """Import NIXL, and check that it has the backends in ``options``."""
        try:
            library = Library()
            plugins = library.plugins()
            lacking, hint = library.lacks(options)
        except ImportError as error:
            reason, hint = _absent(error)
            return Probe(ok=False, reason=reason, hint=hint)
        except Exception as error:  # a probe explains what a broken installation raises, whatever it is
            return Probe(ok=False, reason=f"NIXL does not start: {type(error).__name__}: {error}")
        rdma = ", ".join(rdma_devices()) or "none"
        details = {"library": library.version, "plugins": ", ".join(plugins), "rdma": rdma}
        if lacking:
            return Probe(ok=False, reason=lacking, hint=hint, details=details)
        reason = f"{library.version} with {', '.join(options.backends)}; RDMA devices: {rdma}"
        return Probe(ok=True, reason=reason, details=details)

    def register(self, regions: Sequence[Region]) -> None:
        """Register each region by itself. This takes a few microseconds, and shows which one is refused."""
        table = Table(regions)
        with self._lock:
            agent = self._open()
            for index, region in enumerate(regions):
                segment, device = place(region)
                try:
                    agent.register_memory(row(region.address, region.nbytes, device), segment)
                except self._library.errors as error:
                    version, (cause, hint) = self._library.version, self._refused(segment, error)
                    raise unregistered(index, region, cause, backend=self.name, library=version, hint=hint) from error
            self._add_card_scratch(agent, regions)
            self._table = table
            self._regions = tuple(regions)
            self._reads_end = self._reads_end and all(region.kind == "dram" for region in regions)

    def _add_card_scratch(self, agent: Any, regions: Sequence[Region]) -> None:
        """Register memory for first writes of peers beside the regions on a card, if all are on one."""
        placed = [(region, place(region)) for region in regions]
        cards = {device for _, (segment, device) in placed if segment == VRAM}
        if len(cards) != 1:
            return
        (card,) = cards
        scratch = scratch_beside([region for region, (segment, _) in placed if segment == VRAM], card)
        if scratch:
            with contextlib.suppress(*self._library.errors):  # then the transport between cards stays unknown
                agent.register_memory(row(scratch, CARD_SCRATCH_BYTES, card), VRAM)
                self._card_scratch, self._card = scratch, card

    def _refused(self, segment: str, error: Exception) -> tuple[str, str]:
        """Why NIXL refused a region, and a hint. It says the same of all memory that its UCX does not know."""
        if segment == DRAM:
            return str(error), ""
        if self._without:
            return f"{error}; UCX's TLS={self._without} leaves out memory of CUDA", f"add cuda_copy to it; {PRINT}"
        lacks = self._library.lacks_cuda()
        if lacks:
            hint = f"put it where the loader finds it, because UCX does not know CUDA without it; {PRINT}"
            return f"{error}; UCX's modules for CUDA do not load: {lacks}", hint
        return str(error), PRINT

    def descriptor(self) -> bytes:
        """The agent's metadata: about 45 bytes for each region."""
        with self._lock:
            agent = self._open()
            try:
                metadata = agent.get_agent_metadata()
            except self._library.errors as error:
                what, version = "NIXL does not say how peers reach this agent", self._library.version
                raise TransferError(what, cause=str(error), backend=self.name, library=version) from error
        version, scratch = self._library.version, SCRATCH.ctypes.data
        on_card = self._card_scratch, self._card
        found = Descriptor.of(self._link, version, scratch, metadata, boot_id(), on_card)
        return found.encode()

    def connect(self, peer: str, descriptor: bytes, regions: Sequence[Region]) -> None:
        """Load a peer's metadata, and write a few bytes to the peer, which also connects its transports.

        A link of the role ``decode`` writes nothing, so its library needs nothing of the peer.
        """
        offered = Descriptor.decode(descriptor, peer)
        table = Table(regions)
        before = self._ledger.get(peer)
        if before is not None:
            self._await(before.greetings)
        with self._lock:
            agent = self._open()
            self._ledger.make_room(peer)  # NIXL repairs no connection, and does not replace one
            if self._writes:
                self._load(agent, peer, offered)
            self._ledger.add(_Peer(peer, table))
        if not self._writes:
            return
        if self._timeout:
            self._greet(peer, offered.scratch)
        words: dict[tuple[str, str], str] = {}
        slow = False
        for here in sorted(self._table.kinds):
            for there in sorted(table.kinds):
                words[here, there], over_tcp = self._word(peer, offered, here, there)
                quick = words[here, there] in (CUDA, RDMA) or over_tcp is False
                slow = slow or (VRAM in (here, there) and not quick)
        with self._lock:
            known = self._ledger.get(peer)
            if known is not None:
                known.words, known.slow = words, slow
                # A component's memory is of the same kind on both sides, as a rule. `submit` notices other pairs.
                alike = [word for (here, there), word in words.items() if here == there]
                known.transport = "+".join(sorted(set(alike or words.values()))) or UNKNOWN

    def _word(self, peer: str, offered: Descriptor, here: str, there: str) -> tuple[str, bool | None]:
        """The transport between a kind of memory here and one at a peer, and whether a probe went over TCP. Blocks."""
        near = offered.host in ("", boot_id())
        cards = (here == VRAM) + (there == VRAM)
        may = self._may_with_cards if cards else self._may
        word = told(may, near=near, cards=cards, over_tcp=None)
        mine = (self._card_scratch, self._card) if here == VRAM else (SCRATCH.ctypes.data, 0)
        theirs = (offered.card_scratch, offered.card) if there == VRAM else (offered.scratch, 0)
        if word != UNKNOWN or not self._timeout or TCP not in may or not mine[0] or not theirs[0]:
            return word, None
        over_tcp = self._over_tcp(peer, (here, *mine), (there, *theirs))
        return told(may, near=near, cards=cards, over_tcp=over_tcp), over_tcp

    def prompt_bytes_to(self, peer: str) -> int:
        """See `statelink.backend.Backend.prompt_bytes_to`.

        From or to a card, a post takes one call of CUDA for each block if `cuda_ipc` or a network card moves it. Where
        UCX copies through the host, it waits for each piece of 8 KiB.
        """
        known = self._ledger.get(peer)
        return 0 if known is not None and known.slow else self.capabilities.prompt_bytes

    @classmethod
    def transports(cls, options: Any) -> frozenset[str]:
        """The transports that UCX may use here: ``rdma``, ``tcp``, ``shm``, ``cuda_ipc``; empty for other backends."""
        return possible(options)

    @classmethod
    def diagnose(cls, options: Any) -> list[Check]:
        """Check the packages of NIXL, and what its UCX may use here."""
        return diagnose(options)

    def submit(self, peer: str, batch: Batch) -> Transfer:
        """Post a batch. Between processes of one host this copies the bytes, and returns when they are copied."""
        with self._lock:
            self._open()
            table = self._ledger.usable(peer).table
        ends = Ends.of(batch, self._table, table)
        parts = parts_of(ends, self._table, table)
        if self._require:
            self._check_pairs(peer, parts)
        return self._post(peer, parts)

    def _check_pairs(self, peer: str, parts: Sequence[Part]) -> None:
        """Refuse blocks between two kinds of memory whose transport is not a required one."""
        known = self._ledger.get(peer)
        for part in parts:
            word = UNKNOWN if known is None else known.words.get((part.near_segment, part.far_segment), UNKNOWN)
            if word not in self._require:
                raise TransferError(
                    "the required transport does not carry bytes between these kinds of memory",
                    cause=f"{' or '.join(sorted(self._require))} is required, and from {part.near_segment} here to "
                    f"{part.far_segment} there it is {word}",
                    hint="keep a component in the same kind of memory on both sides",
                    backend=self.name,
                    peer=peer,
                )

    def close(self) -> None:
        """Destroy the agent: its threads, its connections and its registrations."""
        with self._lock:
            try:
                handles, _ = self._ledger.close()
                self._release(handles)  # a handle also refers to the agent
            finally:
                self._agent = None
                self._threads.end()

    def _open(self) -> Any:
        if self._agent is None:
            raise TransferError("the backend is closed", backend=self.name)
        return self._agent

    def _load(self, agent: Any, peer: str, offered: Descriptor) -> None:
        """Load ``peer`` in the library."""
        try:
            loaded = agent.add_remote_agent(offered.metadata)
        except self._library.errors as error:
            agent.remove_remote_agent(peer)  # a part of it may be loaded
            cause = f"{error} for metadata of {offered.library}; this is {self._library.version}"
            raise Descriptor.refused(peer, cause) from error
        name = loaded.decode(errors="replace") if isinstance(loaded, bytes) else str(loaded)
        if name != peer:
            if self._ledger.get(name) is None:
                agent.remove_remote_agent(name)
            raise Descriptor.refused(peer, f"its metadata is that of an agent called {name!r}")

    def _post(self, peer: str, parts: Sequence[Part]) -> Posted[_Peer]:
        """Start all parts of a transfer."""
        with self._lock:
            agent = self._open()
            work = Posted(self._ledger.usable(peer))
            handles: list[Any] = []
            try:
                for part in parts:
                    near = agent.get_xfer_descs(part.near, part.near_segment)
                    far = agent.get_xfer_descs(part.far, part.far_segment)
                    handles.append(agent.initialize_xfer("WRITE", near, far, peer))
            except self._library.errors as error:
                self._release(handles)
                raise TransferError(
                    "NIXL refused a transfer before it started",
                    cause=f"{error}; most often, a block is outside the memory that one side registered",
                    backend=self.name,
                    peer=peer,
                    library=self._library.version,
                ) from error
            for posted, handle in enumerate(handles, 1):
                if not self._ended(work, handle, agent.transfer):
                    work.handles.append(handle)
                if work.outcome is not None:
                    self._release(handles[posted:])
                    break
            self._ledger.posted.append(work)
            self._sweep()
            return work

    def _ended(self, work: Posted[_Peer], handle: Any, step: Callable[[Any], str]) -> bool:
        """Whether a handle has ended. ``step`` posts or checks it. If it failed, its transfer fails."""
        try:
            state = step(handle)
            if state == "PROC":
                return False
            if state != "DONE":
                self._fail(work, f"NIXL reports the state {state}")
        except self._library.errors as error:
            lost = isinstance(error, self._library.disconnected)
            if lost:
                work.peer.lost = str(error)
            self._fail(work, str(error), settled=lost and self._reads_end and Side.SOURCE)
        self._release([handle])
        return True

    def _is_over(self, work: Posted[_Peer], handle: Any) -> bool:
        return self._ended(work, handle, self._agent.check_xfer_state)

    def _fail(self, work: Posted[_Peer], reason: str, *, settled: bool | Side = False) -> None:
        """Fail it, unless it has an outcome.

        Usually it is not settled, because one failed operation says nothing about the others of the batch, and NIXL
        stops none.
        """
        if work.outcome is None:
            work.fail(reason, settled=settled)

    def _sweep(self) -> None:
        """Find transfers that have ended, and limit the number of those that never end. The caller holds the lock."""
        super()._sweep()
        kept = [work for work in self._ledger.posted if work.outcome or work.peer.leaving]
        for work in kept[:-MAX_KEPT]:
            self._fail(work, "the peer was disconnected, and the transfer did not end")
            self._release(work.handles)
            work.handles = []

    def _release(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            with contextlib.suppress(*self._library.errors):  # it is then freed with the agent
                handle.release()

    def _remove(self, known: _Peer) -> None:
        if not self._writes:
            return
        self._agent.remove_remote_agent(known.name)
        self._threads.close_connections()

    def _greet(self, peer: str, scratch: int) -> None:
        """Write a few bytes that nobody reads, so that the library connects all that it has to the peer.

        The threads connect beside the first requests, which are small as a rule: this waits for one write alone, which
        goes over the connection of these.

        Raises:
            TransferError: The peer did not take the bytes.
        """
        here, there = (DRAM, SCRATCH.ctypes.data, 0), (DRAM, scratch, 0)
        greetings = [
            self._write(peer, here, there, self._threads.blocks, GREETING) for _ in range(self._threads.greetings)
        ]
        with self._lock:
            known = self._ledger.get(peer)
            if known is not None:
                known.greetings = greetings
        self._probe(peer, here, there, 1, GREETING)

    def _over_tcp(self, peer: str, near: Place, far: Place) -> bool:
        """Whether bytes to a peer use TCP. Makes a transfer, and compares it with the kernel's count of bytes over TCP.

        Bytes of other peers count, too. So a ``True`` may be wrong, but a ``False`` is right.
        """
        self._probe(peer, near, far, 1, GREETING)  # what connects the two does not count
        before = sent_over_tcp()
        self._probe(peer, near, far, PROBES, CARD_SCRATCH_BYTES)
        return sent_over_tcp() - before >= PROBES * CARD_SCRATCH_BYTES // 2

    def _probe(self, peer: str, near: Place, far: Place, rows: int, nbytes: int) -> None:
        """Write to a peer's scratch memory, and wait.

        Raises:
            TransferError: The peer did not take the write.
        """
        work = self._write(peer, near, far, rows, nbytes)
        self._await([work])
        if work.outcome is None or not work.outcome.ok:
            silence = f"it did not take a first write within {self._timeout:g} s"
            cause = work.outcome.reason if work.outcome else silence
            self.disconnect(peer)
            raise Descriptor.refused(peer, cause)

    def _write(self, peer: str, near: Place, far: Place, rows: int, nbytes: int) -> Posted[_Peer]:
        """Begin to write to a peer's scratch memory.

        Raises:
            TransferError: NIXL refused the write.
        """
        (here, *mine), (there, *theirs) = near, far
        ours, others = (np.repeat(row(address, nbytes, device), rows, axis=0) for address, device in (mine, theirs))
        try:
            return self._post(peer, [Part(here, ours, there, others)])
        except TransferError as error:
            self.disconnect(peer)
            raise Descriptor.refused(peer, str(error.reason.cause)) from error

    def _await(self, works: Sequence[Posted[_Peer]]) -> None:
        """Wait until transfers have ended, for `connect_timeout` at most."""
        deadline = time.monotonic() + self._timeout
        while any(work.outcome is None for work in works) and time.monotonic() < deadline:
            time.sleep(0.0005)
            self.poll(works)


def _absent(error: Exception) -> tuple[str, str]:
    """Why NIXL cannot be imported, and what helps."""
    if isinstance(error, ModuleNotFoundError) and error.name == "nixl":
        return (
            "NIXL is not installed",
            "pip install nixl, which also installs torch with CUDA if there is no torch: 6 GB",
        )
    return f"NIXL is installed, and its import fails: {error}", ""
