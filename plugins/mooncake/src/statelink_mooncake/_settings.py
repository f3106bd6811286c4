"""The library's own settings, ``MC_*`` in the environment. It reads them once, when it is imported."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

__all__ = ["ENTRIES", "Unusable", "apply", "transfer_seconds"]

ENTRIES = 1024
"""How many entries the library's TCP transport takes to a peer, unless it is told otherwise."""

QUEUE = "TCP_MAX_QUEUED_TRANSFERS_PER_PEER"


class Unusable(ImportError):
    """The library must not be imported with these settings, or was imported without them."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.hint = hint


def apply(settings: Mapping[str, str]) -> None:
    """Set settings, given without ``MC_``, in the environment. They stay there.

    Raises:
        Unusable: The library was imported with other settings, or these settings do harm.
    """
    wanted = {f"MC_{name}": value for name, value in settings.items()}
    if "mooncake.engine" in sys.modules:
        differ = [name for name, value in wanted.items() if os.environ.get(name) != value]
        if differ:
            reason = f"Mooncake was imported with another {', '.join(differ)}, and reads it once for the whole process"
            hint = "give all links of a process the same `port` and `mc`, and open one before Mooncake is imported"
            raise Unusable(reason, hint)
    elif wanted.get("MC_LOG_DIR", os.environ.get("MC_LOG_DIR")) is not None:
        # With it, version 0.3.13 starts its logging twice, and its import ends the process with SIGABRT.
        raise Unusable("Mooncake ends the process when it is imported with MC_LOG_DIR set", "unset MC_LOG_DIR")
    limit = wanted.get(f"MC_{QUEUE}", os.environ.get(f"MC_{QUEUE}", ""))
    if limit.isdecimal() and int(limit) < ENTRIES:
        reason = f"MC_{QUEUE}={limit} is less than the {ENTRIES} entries that one batch may have"
        raise Unusable(reason, f"leave it out, or set it to {ENTRIES} or more")
    os.environ.update(wanted)
    # Without this, each engine prints a dozen lines.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")


def transfer_seconds() -> int:
    """After how many seconds an engine that starts here gives up a transfer: as it reads that itself, 5 at least."""
    written = os.environ.get("MC_TRANSFER_TIMEOUT")
    if written is None:
        return 30
    digits = re.match(r"\s*\d+", written)
    return max(5, int(digits[0]) if digits else 0)
