"""Prefill's side of one request: SGLang's "KV sender"."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base.conn import BaseKVSender, KVTransferMetric

from statelink import Pages
from statelink.errors import RoomError, StatelinkError

from ._chunk import Chunk
from ._hooks import announced
from ._items import add_states
from ._transfer import BOOTSTRAPPING, FAILED, SUCCESS, TRANSFERRING, WAITING, Transfer

if TYPE_CHECKING:
    from statelink import Sending, Status

    from ._manager import Manager

__all__ = ["Sender"]

Push = tuple[dict[str, Any], tuple[int, int], tuple[int, int] | None]
"""Items, their span, and the model's layers of which they are; ``None`` for all."""

PROMPT_SECONDS = 1e-6
"""Seconds to a deadline that ends a room at once."""


class Sender(Transfer, BaseKVSender):
    """Opens the room soon, so that decode's request finds it, and pushes what SGLang sends. N comes from decode.

    One thread of the manager opens the room, and another one makes the pushes. So SGLang's lists of a chunk must stay
    as they are until the request has ended, as for SGLang's own backends, and a push that the link refuses fails the
    request a little later.

    While a forward pass computes a chunk, layers of it are pushed (`begin_layers`). SGLang sends the chunk later, and
    then the rest of it is pushed.

    It reports states as SGLang's queues expect them: before `init` nothing above WAITING, and Success only after the
    last chunk, also on a rank from which decode reads nothing.
    """

    limit = "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"

    _early_send_wait_event: Any = None
    """SGLang sets it before a chunk that a forward may still be writing; it guards only that chunk."""
    _pages: int | None = None
    _row = -1
    _sent = 0
    _at = 0
    _complete = False
    _over = False
    """Whether SGLang is done with the request."""
    _ahead = 0
    """The furthest position of a chunk whose forward pass was launched, if its layers may leave; 0 before."""
    _handed = 0
    """What was handed to the thread of the pushes. The scheduler's thread counts it."""
    _pushed = 0
    """Of these, how many it is done with. It counts them."""
    _made = 0
    """Pushes that the link has taken. The thread of the pushes counts them."""
    _began: float | None = None
    _took: float | None = None
    _failed_at: float | None = None
    _sending: Sending | None = None

    def __init__(
        self,
        mgr: Manager,
        bootstrap_addr: str,
        bootstrap_room: Any,
        req_has_disagg_prefill_dp_rank: bool = False,
        **destinations: Any,
    ) -> None:
        """Ask for the room to be opened.

        Args:
            mgr: The scheduler's manager.
            bootstrap_addr: Where the bootstrap server listens.
            bootstrap_room: The request's room.
            req_has_disagg_prefill_dp_rank: Whether the request says which DP rank has it.
            destinations: To which ranks older releases of SGLang would have it send. The link knows them.
        """
        super().__init__(mgr, bootstrap_room)
        self._chunks: list[Chunk] = []
        """Chunks of which layers may have left, and that SGLang has not sent yet. For the thread of the pushes."""
        self._kept: list[Callable[[], object]] = []
        """They give pages back to others that layers may be read from. The scheduler's thread."""
        self._patience = time.monotonic() + mgr.timeouts.bootstrap
        """Time until which decode must have named its memory. Once it has, SGLang sets no limit to the forward."""
        request = announced(bootstrap_room)
        self._content = None if request is None else request.content
        if request is not None and request.wrong:
            self.fail(request.wrong)
        if self._failure:
            return
        if not req_has_disagg_prefill_dp_rank:  # else decode knows the DP rank from the request
            rank, ranks = mgr.dp
            if not mgr.follows:
                mgr.announce(bootstrap_room)
            elif ranks > 1 and bootstrap_room % ranks != rank:
                self.fail(
                    f"the request came to DP rank {rank} of {ranks} on prefill, and decode looks for its room "
                    f"{bootstrap_room} on DP rank {bootstrap_room % ranks}; name 'disagg_prefill_dp_rank' in the "
                    "request, or start prefill with another --load-balance-method"
                )
                return
        mgr.calls.put((self._attempt, (self._open,)))

    def _attempt(self, step: Callable[..., None], *arguments: Any) -> None:
        """Take a step of the request, which fails if that raises anything. On the thread of the calls."""
        try:
            step(*arguments)
        except (StatelinkError, ValueError) as error:
            self.fail(str(error))
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}")
            raise

    def _open(self) -> None:
        """Open the room. On the thread of the calls."""
        room = self.kv_mgr.link.send(self.bootstrap_room, deadline=math.inf, content=self._content)
        self._sending = room
        self._room = room
        if self._given_up:
            room.abort(self._given_up)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Decode has named its memory. SGLang calls `send` after this.

        Args:
            num_kv_indices: Pages that all chunks have together.
            aux_index: This request's metadata row.
        """
        self._pages = num_kv_indices
        self._row = -1 if aux_index is None else aux_index
        self._settled = None
        if self.failed:
            return
        sending = self._sending
        if sending is None or sending.tokens is None:
            self.fail("SGLang has pages of the request, and decode has not named its memory for it")
            return
        self._tokens = sending.tokens
        self._at = sending.prefix or 0
        page = self.kv_mgr.page_size
        if self._at % page:
            self.fail(
                f"decode holds {self._at} tokens of the request already, which is no multiple of prefill's page of "
                f"{page} tokens; give both servers the same --page-size"
            )
        elif -(-(self._tokens - self._at) // page) != num_kv_indices:
            self.fail(
                f"decode asks for tokens [{self._at}, {self._tokens}), and prefill has {num_kv_indices} pages of "
                f"{page} tokens for them; the two servers have different prompts"
            )

    def pop_decode_prefix_len(self) -> int:
        """Number of tokens that decode holds already (P)."""
        sending = self._sending
        return 0 if sending is None else sending.prefix or 0

    def get_max_transfer_tokens(self) -> int | None:
        """Chunks may be of any length."""
        return None

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        """Whether a chunk is sent. The last one is, even without pages, for the other state and the metadata row."""
        return num_pages > 0 or last_chunk

    def send(
        self, kv_indices: Any, state_indices: Sequence[Any] | None = None, num_kv_tokens: int | None = None
    ) -> None:
        """Push a chunk.

        Args:
            kv_indices: Its pages.
            state_indices: With the last chunk, a list of indices for each of SGLang's state types; else ``None``.
            num_kv_tokens: Its tokens.
        """
        ready = self._early_send_wait_event
        if ready is not None:
            self._early_send_wait_event = None
        self._settled = None
        if self.failed:
            return
        start = self._at
        self._at = end = start + (num_kv_tokens or 0)
        self._sent += len(kv_indices)
        last = state_indices is not None
        if self._began is None:
            self._began = time.perf_counter()
        if last != (end == self._tokens) or (last and self._sent != self._pages):
            self.fail(
                f"SGLang sent tokens [{start}, {end}) of {self._tokens} and {self._sent} of {self._pages} pages "
                f"{'as' if last else 'before'} the last chunk"
            )
            return
        self._handed += 1
        self._complete = last
        self.kv_mgr.pushes.put((self._push, (self._push_chunk, kv_indices, state_indices, (start, end), ready)))

    # Layers that leave while the forward pass runs.

    @property
    def sends_layers(self) -> bool:
        """Whether layers of any chunk may have left before SGLang sent the chunk. The same on all ranks of a stage."""
        return self._ahead > 0

    def begin_layers(self, start: int, end: int) -> Chunk | None:
        """A forward pass is launched that computes a chunk. `None` if nothing of it may leave before SGLang sends it.

        Args:
            start: Where SGLang's next chunk begins. The chunk of an earlier forward pass may not have been sent yet.
            end: Where the chunk ends: at a page, or at N.
        """
        start = max(start, self._ahead)
        if self._pages is None or end <= start:
            return None
        self._ahead = end
        return None if self.failed else Chunk(self, start, end)

    @property
    def under_way(self) -> bool:
        """Whether something that was handed over, or pushed, has not arrived."""
        sending = self._sending
        if sending is None or sending.status in (FAILED, SUCCESS):
            return False
        return self._pushed < self._handed or sending.settled < self._made

    def hand_layers(self) -> None:
        """Layers of a chunk are handed to the thread of the pushes."""
        self._handed += 1
        if self._began is None:
            self._began = time.perf_counter()

    def push_layers(self, chunk: Chunk, layers: int, ready: Any) -> None:
        """Push so many of a chunk's first layers, less those that were pushed. On the thread of the pushes."""
        self._push(self._push_layers, chunk, layers, ready)

    def _push_layers(self, chunk: Chunk, layers: int, ready: Any) -> None:
        if chunk not in self._chunks:
            self._chunks.append(chunk)
        sending, order = self._sending, self.kv_mgr.layer_order
        assert sending is not None
        span, some = (chunk.start, chunk.end), (order[chunk.layers], order[layers - 1] + 1)
        items = dict.fromkeys(self.kv_mgr.lists.layered, Pages(chunk.pages, chunk.start))
        try:
            sending.push(items, span=span, layers=some, ready=ready, last=False)
        except RoomError as error:
            if error.code != "room.pushes":
                raise
            return  # they leave with a later group, or when SGLang sends the chunk
        self._made += 1
        chunk.layers = layers

    def keep(self, frees: list[Callable[[], object]]) -> None:
        """Give pages back only when SGLang is done with the request, because layers of them may be read until then."""
        self._kept += frees
        if self._over:
            self._give_back()

    def _give_back(self) -> None:
        """SGLang is done with the request: its pages are given to others."""
        self._over = True
        kept, self._kept = self._kept, []
        for free in kept:
            free()

    # On the thread of the pushes.

    def _push(self, step: Callable[..., None], *arguments: Any) -> None:
        """Push something, unless the request has failed meanwhile."""
        try:
            if not self._failure and self.conclude_state != FAILED:
                self._attempt(step, *arguments)
        finally:
            self._pushed += 1

    def _push_chunk(self, pages: Any, states: Sequence[Any] | None, span: tuple[int, int], ready: Any) -> None:
        """Push what is left of a chunk that SGLang sends."""
        sending, lists = self._sending, self.kv_mgr.lists
        assert sending is not None
        pushes, last = [*self._left(pages, span)], dict[str, Any]()
        if states is not None and lists.whole - lists.beside:
            span = 0, self._tokens  # these lists are of the whole request, and may begin before this chunk
        elif states is not None and pushes and pushes[-1][2] is None:
            last, span, _ = pushes.pop()
        for items, part, layers in pushes:
            sending.push(items, span=part, layers=layers, ready=ready, last=False)
            self._made += 1
        if states is None:
            return
        add_states(last, lists, states, lists.beside)
        if self.kv_mgr.has_rows:
            last["aux"] = self._row
        sending.push(last, span=span, ready=ready, last=True)

    def _left(self, pages: Any, span: tuple[int, int]) -> Iterator[Push]:
        """What of some pages has not left by layers: items, their span, and their layers."""
        lists, order, page = self.kv_mgr.lists, self.kv_mgr.layer_order, self.kv_mgr.page_size
        everything = (*lists.pages, *lists.beside)
        others = [name for name in everything if name not in lists.layered]
        for start, end, layers in self._parts(span):
            part = pages[(start - span[0]) // page : -(-(end - span[0]) // page)]
            some = Pages(part, start)
            if not len(part):
                continue
            if 0 < layers < len(order):
                yield dict.fromkeys(lists.layered, some), (start, end), (order[layers], order[-1] + 1)
            names = others if layers else everything
            if names:
                yield dict.fromkeys(names, some), (start, end), None

    def _parts(self, span: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
        """The parts of a span, from start to end, and how many layers of each have left."""
        at, end = span
        for chunk in self._chunks:
            if chunk.start > at:
                yield at, min(chunk.start, end), 0
            at = max(at, min(chunk.start, end))
            if at < min(chunk.end, end):
                yield at, min(chunk.end, end), chunk.layers
                at = min(chunk.end, end)
        if at < end:
            yield at, end, 0
        self._chunks = [each for each in self._chunks if each.end > end]

    def poll_pp_consensus(self) -> int:
        """As `poll`, for the ranks of all pipeline stages. SGLang asks on the first stage, and tells the others."""
        state, sending = self.poll(), self._sending
        if self.kv_mgr.stages == 1 or state == FAILED or sending is None:
            return state
        everywhere = int(sending.poll_all())
        return self._failing() if everywhere == FAILED else min(state, everywhere)

    def _state(self, status: Status | None) -> int:
        if self._failure or status == FAILED:
            return self._failing()
        sending = self._sending
        if status is None or sending is None:
            return BOOTSTRAPPING  # the room is opened soon
        if status == BOOTSTRAPPING:
            if time.monotonic() >= self._patience:
                sending.extend(PROMPT_SECONDS)  # the link fails the room, and says for whom it waited
                self._patience = math.inf
            self._again = self._patience
        if not self._complete:
            # A rank from which nobody reads has succeeded before its last chunk, and must look like its siblings.
            return min(int(status), WAITING if self._pages is None else TRANSFERRING)
        if status == SUCCESS and self._took is None and self._began is not None:
            self._took = time.perf_counter() - self._began
        return int(status)

    def _failing(self) -> int:
        """The state to report for a failed request: `FAILED`, or `TRANSFERRING` while a transfer may read its pages.

        SGLang gives the pages to other requests as soon as it sees `FAILED`. So this waits until the room has quiesced,
        but no longer than the time limit ``hold``. A transfer that reads the pages later does no harm: decode's room
        has failed, and decode keeps the memory that the transfer writes to until the transfer has ended. Before the
        first chunk nothing reads the pages, and SGLang's bootstrap queue does not accept `TRANSFERRING`.
        """
        if self._began is None or self._quiet:
            return FAILED
        now = time.monotonic()
        self._failed_at = self._failed_at or now
        if now - self._failed_at < self.kv_mgr.timeouts.hold:
            return TRANSFERRING
        return FAILED

    @property
    def _quiet(self) -> bool:
        """Whether nothing reads the request's pages, and nothing will."""
        # In this order: a push that has returned is known to the room.
        return self._pushed == self._handed and (self._room is None or self._room.quiesced)

    def failure_exception(self) -> None:
        """Raise why the request failed. Then SGLang gives its pages to others, even if a transfer still reads them.

        Raises:
            TransferFailed: Always.
        """
        try:
            super().failure_exception()
        finally:
            self._give_back()
            room = self._room
            if room is not None and not self._quiet:
                room.take_back("SGLang takes the pages of a failed request back")

    def abort(self) -> None:
        """SGLang gives the request up, and its pages to others: decode's room has failed. Does not block."""
        super().abort()
        self._give_back()

    def clear(self) -> None:
        """SGLang is done with the request."""
        super().clear()
        self._give_back()

    def get_transfer_metric(self) -> Any:
        """Seconds from the first chunk until decode had everything, and the bytes that this rank moved."""
        nbytes = 0 if self._sending is None else self._sending.nbytes
        return KVTransferMetric(transfer_latency_s=self._took, transfer_total_bytes=nbytes)
