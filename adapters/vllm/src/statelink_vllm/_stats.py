"""What was moved, for vLLM's log and for its Prometheus metrics. vLLM carries it from the workers to the API server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from statelink import Status

if TYPE_CHECKING:
    from statelink import Room

__all__ = ["PromMetrics", "TransferStats", "declined"]

SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]
BYTES = [4.0**power for power in range(6, 18)]
"""Upper bounds of the buckets of bytes: from 4 KiB to 16 GiB."""


def declined(room: Room) -> bool:
    """Whether a room has ended because decode does not need the state, as for a prompt that it has already."""
    return room.reason is not None and room.reason.code == "room.declined"


class TransferStats(KVConnectorStats):
    """Counts the rooms that ended in an interval, on one side. It has plain values only, as another process gets it.

    The values are ``seconds`` and ``bytes`` of each room that succeeded, the number of rooms that decode ``declined``,
    and in ``failed`` the number of all others for each code of a reason.
    """

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Set all counts back to zero."""
        self.data = {"seconds": [], "bytes": [], "declined": 0, "failed": {}}

    def record(self, room: Room, *, unwanted: bool = False) -> None:
        """Take a room that has ended, and whether nobody wanted its state."""
        if room.status is Status.SUCCEEDED:
            report = room.report
            self.data["seconds"].append(report.transferred)
            self.data["bytes"].append(sum(moved.nbytes for moved in report.moved.values()))
        elif unwanted or declined(room):
            self.data["declined"] += 1
        else:
            code = "unknown" if room.reason is None else room.reason.code
            self.data["failed"][code] = self.data["failed"].get(code, 0) + 1

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another rank or interval has."""
        for name in ("seconds", "bytes"):
            self.data[name] = [*self.data[name], *other.data[name]]
        self.data["declined"] += other.data["declined"]
        for code, count in other.data["failed"].items():
            self.data["failed"][code] = self.data["failed"].get(code, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """A few numbers for the log."""
        seconds, nbytes = self.data["seconds"], self.data["bytes"]
        made: dict[str, int | float] = {"Transfers": len(seconds)}
        if seconds:
            made["Mean time (ms)"] = round(1e3 * sum(seconds) / len(seconds), 3)
            made["Longest time (ms)"] = round(1e3 * max(seconds), 3)
            made["MiB"] = round(sum(nbytes) / (1 << 20), 3)
        if self.data["declined"]:
            made["Declined"] = self.data["declined"]
        for code, count in sorted(self.data["failed"].items()):
            made[f"Failed: {code}"] = count
        return made

    def is_empty(self) -> bool:
        """Whether no room has ended."""
        return not (self.data["seconds"] or self.data["declined"] or self.data["failed"])


class PromMetrics(KVConnectorPromMetrics):
    """The same as metrics.

    They are `vllm:statelink_transfer_seconds` and `..._bytes`, `vllm:statelink_declined_transfers`, and
    `vllm:statelink_failed_transfers`, by the code of the reason.
    """

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._seconds = self._made(
            self._histogram_cls,
            "vllm:statelink_transfer_seconds",
            "Seconds from the moment when both servers knew of a request until its state had moved.",
            buckets=SECONDS,
        )
        self._bytes = self._made(
            self._histogram_cls, "vllm:statelink_transfer_bytes", "Bytes of state of a request.", buckets=BYTES
        )
        self._declined = self._made(
            self._counter_cls, "vllm:statelink_declined_transfers", "Requests whose state decode did not want."
        )
        self._failed = self._counter_cls(
            name="vllm:statelink_failed_transfers",
            documentation="Requests whose state was not moved, by the code of the reason.",
            labelnames=[*self._labelnames, "code"],
        )

    def _made(self, kind: Any, name: str, text: str, **more: Any) -> Any:
        metric = kind(name=name, documentation=text, labelnames=self._labelnames, **more)
        return create_metric_per_engine(metric, self.per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take what an engine sent."""
        for each in transfer_stats_data["seconds"]:
            self._seconds[engine_idx].observe(each)
        for each in transfer_stats_data["bytes"]:
            self._bytes[engine_idx].observe(each)
        self._declined[engine_idx].inc(transfer_stats_data["declined"])
        for code, count in transfer_stats_data["failed"].items():
            self._failed.labels(*self.per_engine_labelvalues[engine_idx], code).inc(count)
