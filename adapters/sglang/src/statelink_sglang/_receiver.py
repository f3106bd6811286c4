"""Decode's side of one request: SGLang's "KV receiver"."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base.conn import BaseKVReceiver

from statelink.errors import StatelinkError

from ._hooks import announced
from ._items import add_states, drop_prefix
from ._rows import fill_row, first_token
from ._transfer import BOOTSTRAPPING, FAILED, SUCCESS, TRANSFERRING, WAITING, Transfer

if TYPE_CHECKING:
    from statelink import Receiving, Status

    from ._directory import Instance, Prefill
    from ._manager import Manager

__all__ = ["Receiver"]

LOOK_AGAIN_SECONDS = 0.1
"""Seconds between two checks that a prefill server is still there, while it has said nothing about a request."""


class Receiver(Transfer, BaseKVReceiver):
    """Opens the room when SGLang has allocated its memory. Before that, the room would only take a place in the link.

    A request that SGLang gives up earlier is declined at prefill, whose room would otherwise wait for it.
    """

    limit = "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"
    require_staging = False
    supports_host_destination = False
    bootstrap_infos: Sequence[Any] = ()
    """SGLang's classes list their connections here, and SGLang counts them. The link has connections of its own."""
    abort_notified = False
    """Whether SGLang has to keep the memory of a failed request until nothing writes to it."""
    _receiving: Receiving | None = None
    _prefill: Prefill | None = None
    """The server, as it was when it was first known."""
    _instance: Instance | None = None
    dp_rank: int | None = None
    """Which of the server's DP ranks has the request; ``None`` while that is not known."""
    _declined = False

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: Any = None) -> None:
        super().__init__(mgr, bootstrap_room)
        self.bootstrap_addr = bootstrap_addr
        self._patience = monotonic() + mgr.timeouts.waiting
        """Time until which a DP rank of prefill must have got the request."""
        self._row: int | None = None
        self._first: int | None = None
        """The first output token, if the request names it."""
        self._no_first = ""
        """Why the request does not name it."""
        request = announced(bootstrap_room)
        self._tokens = 0 if request is None else request.tokens
        self._content = None if request is None else request.content
        if request is not None and request.wrong:
            self.fail(request.wrong)
        if mgr.rows_optional and request is not None:
            try:
                self._first = first_token(request.request, mgr.vocabulary)
            except ValueError as error:
                self._no_first = str(error)
        if not self.failed and self._tokens < 1:
            self.fail("the number of tokens of the request is not known")

    def init(self, prefill_dp_rank: int) -> None:
        """SGLang knows the prefill server, and which of its DP ranks has the request. Does not block."""
        prefill = self.kv_mgr.prefill_info_table.get(self.bootstrap_addr)
        self.kv_mgr.forget_dp_rank(self.bootstrap_addr, self.bootstrap_room)
        if prefill is None:
            self.fail(self._unknown())
        elif not 0 <= prefill_dp_rank < prefill.dp_size:
            self.fail(
                f"the request names DP rank {prefill_dp_rank} of the prefill server at {self.bootstrap_addr}, "
                f"which has {prefill.dp_size}"
            )
        else:
            self._instance, self.dp_rank = prefill.instances[prefill_dp_rank], prefill_dp_rank
            if self.failed:
                self._give_up(self._failure)

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = None,
    ) -> None:
        """Name the memory, and open the room. Does not block.

        Args:
            kv_indices: Pages of the tokens from P on.
            aux_index: The metadata row.
            state_indices: A list of indices for each of SGLang's state types.
            decode_prefix_len: P: tokens that decode holds already.
            destination: Always the device: `supports_host_destination` is false.
        """
        if self.failed or self._instance is None:
            return
        lists = self.kv_mgr.lists
        items: dict[str, Any] = dict.fromkeys(lists.pages, kv_indices)
        items["aux"] = self._row = aux_index
        try:
            add_states(items, lists, state_indices or ())
            if decode_prefix_len:
                drop_prefix(items, len(kv_indices))
            self._room = self._receiving = self.kv_mgr.link.receive(
                self.bootstrap_room,
                self._instance.addresses,
                self._tokens,
                items,
                prefix=decode_prefix_len or 0,
                ready=self.kv_mgr.memory_is_free(),
                deadline=self.kv_mgr.timeouts.waiting,
                content=self._content,
            )
        except (StatelinkError, ValueError) as error:
            self.fail(str(error))

    def _state(self, status: Status | None) -> int:
        instance = self._instance
        if self._failure or status == FAILED:
            return FAILED
        if instance is None:
            return self._looking()
        if status is None or status == BOOTSTRAPPING:
            if instance.gone:
                self.fail(instance.gone)
                return FAILED
            self._again = monotonic() + LOOK_AGAIN_SECONDS
        if status is None:
            return WAITING  # for memory, for which SGLang has no time limit
        if status != SUCCESS:
            return TRANSFERRING
        return SUCCESS if self._has_row() else FAILED

    def _looking(self) -> int:
        """The state while it is not known which DP rank of prefill has the request."""
        self._prefill = self._prefill or self.kv_mgr.prefill_info_table.get(self.bootstrap_addr)
        if self._prefill is not None:  # for a server that is not known, SGLang has a limit of its own
            if self._prefill.gone:
                self.fail(self._prefill.gone)
            elif monotonic() >= self._patience:
                self.fail(
                    f"none of the {self._prefill.dp_size} DP ranks of the prefill server at {self.bootstrap_addr} has "
                    f"got the request; the limit is {self.limit}"
                )
        if self._failure:
            return FAILED
        self._again = monotonic() + LOOK_AGAIN_SECONDS
        return BOOTSTRAPPING

    def _has_row(self) -> bool:
        """Whether the metadata row is complete: it came from prefill, or is filled here with what the request names."""
        receiving = self._receiving
        if not self.kv_mgr.rows_optional or receiving is None or "aux" in receiving.report.moved:
            return True
        if self._first is None or self._row is None:
            self.fail(f"prefill has no metadata rows, and the first token is not known: {self._no_first}")
            return False
        fill_row(self.kv_mgr.metadata, self._row, self._first, self.bootstrap_room)
        return True

    def abort(self) -> None:
        """SGLang gives the request up: a client has gone, or the prefill server cannot be found."""
        unknown = self._instance is None and self.kv_mgr.why_unknown(self.bootstrap_addr)
        self.fail(self._unknown() if unknown else "SGLang aborted the request")
        self.conclude_state = FAILED  # also if the state is there, and other pipeline stages still wait for theirs
        self.ensure_abort_notified()

    def overrule(self) -> None:
        """Another pipeline stage has failed the request. So it fails here, even if the state has come."""
        self.conclude_state, self._settled = FAILED, None

    def clear(self) -> None:
        """SGLang is done with the request. A request for which SGLang has named no memory yet then fails.

        If SGLang kept the memory of a failed request, it has given that memory to others by now.
        """
        if self._receiving is None and not self.failed:
            self.fail("SGLang gave the request up")
        if self._instance is None:
            self.kv_mgr.forget_dp_rank(self.bootstrap_addr, self.bootstrap_room)
        if self._receiving is not None and self.abort_notified:
            self.kv_mgr.let_go(self.bootstrap_room, self._receiving)
        super().clear()

    def _give_up(self, why: str) -> None:
        super()._give_up(why)
        if self._receiving is not None or self._declined:
            return
        instances = [self._instance] if self._instance is not None else []
        if not instances and (prefill := self.kv_mgr.prefill_info_table.get(self.bootstrap_addr)) is not None:
            # Any of its DP ranks may have the request, or get it later.
            instances = [*prefill.instances]
        self._declined = bool(instances)
        for each in instances:
            self.kv_mgr.declines.decline(self.kv_mgr.link, self.bootstrap_room, each.addresses, why)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Note that SGLang must keep the memory of the request, if it has any. May be called twice.

        The link tells prefill that the request has ended.

        Args:
            force_arm: SGLang has memory for the request. If no room has named it, the request failed before, and
                nothing writes to the memory. It is kept all the same, because other ranks may have named theirs, and
                all give it back at the same time.
        """
        if self._receiving is not None and not self.abort_notified:
            self.kv_mgr.hold(self.bootstrap_room, self._receiving)
        self.abort_notified = self.abort_notified or force_arm or self._receiving is not None

    def _unknown(self) -> str:
        why = self.kv_mgr.why_unknown(self.bootstrap_addr)
        return f"the prefill server at {self.bootstrap_addr} is not known{f': {why}' if why else ''}"
