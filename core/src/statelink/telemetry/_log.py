"""A line of the log for each room that ends, with fields that a formatter for structured logs takes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ._observer import RoomObserver

if TYPE_CHECKING:
    from statelink.backend import RoomReport

__all__ = ["LogObserver"]

log = logging.getLogger("statelink.rooms")


class LogObserver(RoomObserver):
    """Logs rooms that succeeded at INFO, and those that failed at WARNING, to the logger ``statelink.rooms``.

    The fields are attributes of the log record, where formatters such as python-json-logger find them.
    """

    def ended(self, report: RoomReport) -> None:
        """See `RoomObserver.ended`."""
        level = logging.INFO if report.reason is None else logging.WARNING
        if not log.isEnabledFor(level):
            return
        why = "" if report.reason is None else f": {report.reason.code}"
        log.log(level, "room %d %s on %s%s", report.room, report.status, report.role, why, extra=self._fields(report))

    def _fields(self, report: RoomReport) -> dict[str, Any]:
        inventory, reason = self.link.inventory, report.reason
        return {
            "room": report.room,
            "role": report.role,
            "status": report.status,
            "reason": None if reason is None else reason.code,
            "error": None if reason is None else str(reason),
            "link": report.link,
            "instance": inventory.instance,
            "rank": inventory.rank,
            "peers": sorted(report.transports),
            "backend": report.backend,
            "tokens": report.tokens,
            "prefix": report.prefix,
            "chunks": report.chunks,
            "bytes": {name: moved.nbytes for name, moved in report.moved.items()},
            "waited_seconds": round(report.waited, 6),
            "transferred_seconds": round(report.transferred, 6),
        }
