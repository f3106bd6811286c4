"""Decode's side of one request: SGLang's "KV receiver"."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base.conn import BaseKVReceiver

from statelink.errors import StatelinkError

from ._sender import one_dimensional
from ._transfer import BOOTSTRAPPING, FAILED, FOREVER, SUCCESS, TRANSFERRING, WAITING, Transfer

if TYPE_CHECKING:
    from statelink import Receiving

    from ._directory import Prefill
    from ._manager import Manager

__all__ = ["Receiver"]


class Receiver(Transfer, BaseKVReceiver):
    """Opens the room when SGLang knows the prefill server, and names the memory when SGLang has allocated it."""

    require_staging = False
    supports_host_destination = False
    bootstrap_infos: Sequence[Any] = ()
    """SGLang's classes list their connections here, and SGLang counts them. The link has connections of its own."""

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: Any = None) -> None:
        super().__init__(mgr, bootstrap_room)
        self.bootstrap_addr = bootstrap_addr
        self.abort_notified = False
        """Whether SGLang has to keep the memory of a failed request until nothing writes to it."""
        self._receiving: Receiving | None = None
        self._prefill: Prefill | None = None
        self._accepted: float | None = None

    def init(self, prefill_dp_rank: int) -> None:
        """SGLang knows the prefill server: open the room. Does not block."""
        if self.failed:
            return
        self._prefill = self.kv_mgr.prefill_info_table.get(self.bootstrap_addr)
        if self._prefill is None:
            self.fail(self._unknown())
            return
        try:
            self._room = self._receiving = self.kv_mgr.link.receive(
                self.bootstrap_room, self._prefill.addresses, self._tokens, deadline=FOREVER
            )
        except StatelinkError as error:
            self.fail(str(error))

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = None,
    ) -> None:
        """Name the memory.

        Args:
            kv_indices: Pages of the tokens from P on.
            aux_index: The metadata row.
            state_indices: A list of indices for each of SGLang's state types.
            decode_prefix_len: P: tokens that decode holds already.
            destination: Always the device: `supports_host_destination` is false.
        """
        if self.failed or self._receiving is None:
            return
        lists = self.kv_mgr.lists
        items: dict[str, Any] = dict.fromkeys(lists.pages, kv_indices)
        items["aux"] = [aux_index]
        try:
            given = zip(lists.states, state_indices or (), strict=True)
            items.update((name, one_dimensional(each)) for name, each in given)
            self._receiving.accept(items, prefix=decode_prefix_len or 0)
        except (StatelinkError, ValueError) as error:
            self.fail(str(error))
        else:
            self._accepted = time.monotonic()

    def poll(self) -> int:
        """How far the request is, as the queue in which it is may see it."""
        if self.conclude_state is not None:
            return self.conclude_state
        return self._conclude(self._state())

    def _state(self) -> int:
        receiving = self._receiving
        if self.failed:
            return FAILED
        if receiving is None:
            return BOOTSTRAPPING
        status = int(receiving.poll())
        if status == BOOTSTRAPPING and self._prefill is not None and self._prefill.gone:
            self.fail(self._prefill.gone)
            return FAILED
        if self._accepted is None:
            return WAITING
        if status < SUCCESS and time.monotonic() - self._accepted > self.kv_mgr.timeouts.waiting:
            self.fail(
                f"the state did not arrive within {self.kv_mgr.timeouts.waiting:g} s "
                "(SGLANG_DISAGGREGATION_WAITING_TIMEOUT)"
            )
            return FAILED
        return SUCCESS if status == SUCCESS else TRANSFERRING

    def abort(self) -> None:
        """SGLang gives the request up: a client has gone, or the prefill server cannot be found."""
        unknown = self._prefill is None and self.kv_mgr.why_unknown(self.bootstrap_addr)
        self.fail(self._unknown() if unknown else "SGLang aborted the request")
        self.ensure_abort_notified()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Prefill learns of the end from the link. Note whether memory must be kept. May be called twice.

        Args:
            force_arm: Not needed: the room knows whether it named memory.
        """
        receiving = self._receiving
        if receiving is not None and self._accepted is not None and not self.abort_notified:
            self.abort_notified = True
            self.kv_mgr.hold(self.bootstrap_room, receiving)

    def _unknown(self) -> str:
        why = self.kv_mgr.why_unknown(self.bootstrap_addr)
        return f"the prefill server at {self.bootstrap_addr} is not known{f': {why}' if why else ''}"
