"""MemFabric: its import, its engine, and its return codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from statelink.backend.native import lacking

from . import _logs

__all__ = ["REFUSED", "Library"]

REFUSED = -2000
"""The code for a batch that is refused. The library checks a whole batch before it moves any of it."""

CODES = {
    -1: "failed",
    REFUSED: "invalid parameter",
    -2001: "out of memory",
    -2002: "no resources",
    -2003: "not started",
    -2004: "timeout",
    -2005: "repeated",
    -2006: "duplicated",
    -2007: "does not exist",
    -2008: "not initialised",
    -2009: "in use",
    -2012: "partly done",
    -2014: "not connected",
    -2015: "buffer too small",
    **dict.fromkeys(range(-3007, -2999), "the store failed"),
    -100: "not supported",
    -101: "not connected",
}
RAISED = -1
"""Stands for the code of a call that raised an exception."""
METHODS = "initialize get_rpc_port batch_register_memory batch_transfer_sync_write destroy unInitialize"


class Library:
    """The imported library."""

    def __init__(self, data_op_type: str) -> None:
        """Import it.

        Raises:
            ImportError: It is not installed, its import failed, or this version lacks what is needed.
        """
        self._module, self._leads = _logs.imported()
        needed = {"TransferEngine": METHODS, "TransDataOpType": data_op_type, "get_and_clear_last_err_msg": "__call__"}
        lacks = lacking(self._module, needed)
        if lacks:
            raise ImportError(f"this version of memfabric_hybrid has no {', '.join(lacks)}")
        if self._leads:
            _logs.lead(self._module)
        self.engine: Any = self._module.TransferEngine()
        self._kind = getattr(self._module.TransDataOpType, data_op_type)

    def start(self, session: str, role: str, device_id: int, nic: str) -> str:
        """Start the engine. Returns the reason if it did not start.

        An engine whose start failed still takes registrations, and reports nothing before a transfer.
        """
        # Only the scheme of the store's URL matters, because each decode side has a store of its own.
        begin = self.engine.initialize
        reason = self.call(begin, "tcp://127.0.0.1:0", session, role, device_id, self._kind, "Decode", nic)[1]
        if self._leads:
            _logs.level(self._module)
        port = self.engine.get_rpc_port() if not reason else 0
        if not reason and not (isinstance(port, int) and 0 < port < 1 << 16):  # one version returned a text
            reason = f"it started without a port, which it says is {port!r}"
        return reason

    def end(self, engine: Any) -> None:
        """Destroy an engine. Takes seconds, and waits for each of its peers that stands still."""
        for call in (engine.destroy, engine.unInitialize):
            self.call(call)  # an error must stop neither the other call nor the next link

    def call(self, function: Callable[..., int], *arguments: Any) -> tuple[int, str]:
        """The code that a call returned, and its text if it is not 0.

        The library keeps its last text for each thread.
        """
        self._module.get_and_clear_last_err_msg()
        try:
            code = function(*arguments)
        except Exception as error:  # raised for arguments that it refuses
            return RAISED, f"MemFabric's {function.__name__} raised {type(error).__name__}: {error}"
        if code == 0:
            return 0, ""
        text = self._module.get_and_clear_last_err_msg()
        known = f" ({CODES[code]})" if code in CODES else ""
        return code, f"MemFabric's {function.__name__} returned {code}{known}{text and ': '}{text}"
