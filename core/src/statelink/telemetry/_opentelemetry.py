"""A span of OpenTelemetry for each room on each side. Both are in one trace, whose id follows from the room."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ._observer import RoomObserver

if TYPE_CHECKING:
    from statelink.backend import RoomReport
    from statelink.link import Link

__all__ = ["OpenTelemetryObserver", "trace_of"]


class OpenTelemetryOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``telemetry.opentelemetry``.

    Attributes:
        ratio: Share of the rooms that are traced. Both sides choose the same rooms.
    """

    ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0


def trace_of(room: int) -> tuple[int, int]:
    """The trace id of a room id, and the span id that all its spans have as their parent."""
    digest = hashlib.blake2b(f"statelink {room}".encode(), digest_size=24).digest()
    return int.from_bytes(digest[:16], "big") or 1, int.from_bytes(digest[16:], "big") or 1


class OpenTelemetryObserver(RoomObserver):
    """Makes spans with the process's tracer provider. Exporting them is the business of that provider."""

    Options = OpenTelemetryOptions
    needs = "opentelemetry.trace"
    extra = "opentelemetry"

    def __init__(self, options: OpenTelemetryOptions, link: Link) -> None:
        super().__init__(options, link)
        from opentelemetry import trace

        self._trace = trace
        self._most = int(options.ratio * (1 << 64))
        inventory = link.inventory
        self._who: dict[str, Any] = {
            "statelink.link": link.name,
            "statelink.instance": inventory.instance,
            "statelink.rank": inventory.rank,
        }

    def ended(self, report: RoomReport) -> None:
        """See `RoomObserver.ended`."""
        trace_id, parent_id = trace_of(report.room)
        if trace_id & ((1 << 64) - 1) >= self._most or report.ended is None:
            return
        trace = self._trace
        sampled = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        parent = trace.NonRecordingSpan(trace.SpanContext(trace_id, parent_id, is_remote=True, trace_flags=sampled))
        begun = report.ended - report.waited - report.transferred
        span = trace.get_tracer("statelink").start_span(
            f"statelink room {report.role}",
            context=trace.set_span_in_context(parent),
            kind=trace.SpanKind.PRODUCER if report.role == "prefill" else trace.SpanKind.CONSUMER,
            attributes={**self._who, **attributes(report)},
            start_time=_nanoseconds(begun),
        )
        if report.status == "succeeded" or report.transferred:
            span.add_event("met", timestamp=_nanoseconds(begun + report.waited))
        if report.reason is not None:
            span.set_status(trace.Status(trace.StatusCode.ERROR, str(report.reason)))
        span.end(_nanoseconds(report.ended))


def attributes(report: RoomReport) -> dict[str, Any]:
    """What a span says of a room. The id is a text, since it may need 64 bits without a sign."""
    said: dict[str, Any] = {
        "statelink.room": str(report.room),
        "statelink.role": report.role,
        "statelink.backend": report.backend,
        "statelink.status": report.status,
        "statelink.tokens": report.tokens,
        "statelink.prefix": report.prefix,
        "statelink.chunks": report.chunks,
        "statelink.peers": sorted(report.transports),
        "statelink.transports": sorted(set(report.transports.values())),
    }
    if report.reason is not None:
        said["error.type"] = report.reason.code
    return said | {f"statelink.bytes.{name}": moved.nbytes for name, moved in report.moved.items()}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
