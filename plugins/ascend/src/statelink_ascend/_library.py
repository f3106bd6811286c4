"""MemFabric itself: its import, its engine, and what its return codes say.

Run as a program, it tries the library in a process of its own, which may end as it likes.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["REFUSED", "Library", "trial"]

REFUSED = -2000
"""The library checks a whole batch before it moves any of it, and then returns this."""

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
}
METHODS = (
    "initialize",
    "get_rpc_port",
    "batch_register_memory",
    "batch_transfer_sync_write",
    "batch_transfer_sync_read",
    "destroy",
    "unInitialize",
)


class Library:
    """The imported library."""

    def __init__(self, data_op_type: str) -> None:
        """Import it.

        Raises:
            ImportError: It is not installed, its import failed, or this version lacks what is needed.
        """
        if not {"MF_LOG_LEVEL", "ASCEND_MF_LOG_LEVEL"} & os.environ.keys():
            os.environ["MF_LOG_LEVEL"] = "3"  # errors; it logs to standard output
        self._module: Any = importlib.import_module("memfabric_hybrid")
        engine: Any = getattr(self._module, "TransferEngine", None)
        kinds: Any = getattr(self._module, "TransDataOpType", None)
        lacks = [f"TransferEngine.{name}" for name in METHODS if not hasattr(engine, name)]
        lacks += [f"TransDataOpType.{data_op_type}"] * (not hasattr(kinds, data_op_type))
        if lacks:
            raise ImportError(f"this version of memfabric_hybrid has no {', '.join(lacks)}")
        self.engine: Any = engine()
        self._kind = getattr(kinds, data_op_type)

    def start(self, session: str, role: str, device_id: int, nic: str) -> str:
        """Start the engine; the reason if it did not.

        An engine whose start failed goes on to take registrations, and says nothing before a transfer.
        """
        # Of the store's URL, only the scheme counts: each decode side has a store of its own.
        begin = self.engine.initialize
        reason = self.call(begin, "tcp://127.0.0.1:0", session, role, device_id, self._kind, "Decode", nic)[1]
        return reason or ("" if self.engine.get_rpc_port() else "it started without a port")

    def call(self, function: Callable[..., int], *arguments: Any) -> tuple[int, str]:
        """What a call returned, and in words if that is not 0. The library keeps its last text for each thread."""
        self._module.get_and_clear_last_err_msg()
        code = function(*arguments)
        if code == 0:
            return 0, ""
        text = self._module.get_and_clear_last_err_msg()
        known = f" ({CODES[code]})" if code in CODES else ""
        return code, f"MemFabric's {function.__name__} returned {code}{known}{text and ': '}{text}"


def trial(data_op_type: str, device_id: int, nic: str) -> tuple[str, str]:
    """Start an engine in another process: why it did not start, and the end of the library's log."""
    done = subprocess.run(
        [sys.executable, __file__, json.dumps([data_op_type, device_id, nic])],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    log = " | ".join(done.stdout.splitlines()[-4:])
    if done.returncode == 0:
        return "", log
    last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
    return last[0] if done.returncode == 1 else f"its start ended the process with status {done.returncode}", log


def main() -> None:
    """Start an engine, and end at once: what it would take seconds to release goes with the process."""
    data_op_type, device_id, nic = json.loads(sys.argv[1])
    try:
        reason = Library(data_op_type).start("127.0.0.1:0", "Prefill", device_id, nic)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    sys.stdout.flush()
    print(reason, file=sys.stderr, flush=True)
    os._exit(1 if reason else 0)


if __name__ == "__main__":
    main()
