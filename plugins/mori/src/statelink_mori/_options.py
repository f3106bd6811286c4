"""The options and their effects."""

from __future__ import annotations

import os

import msgspec

__all__ = ["Options"]

TRANSPORTS = frozenset({"RDMA", "XGMI"})
AUTO_XGMI = "MORI_DISABLE_AUTO_XGMI"
FIXED = {
    "enable_notification": "always off: the library keeps every notification for ever",
    "poll_cq_mode": "always POLLING: with EVENT, the library closes file descriptor 0, whoever holds it by then",
}


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the ``mori`` backend.

    Attributes:
        backends: MoRI's own backends to create, in order, and the parameters of each under the library's names, such
            as ``{"XGMI": {}, "RDMA": {"qp_per_transfer": 2}}``. The library prefers XGMI if it can serve a pair of
            memories. ``MORI_IO_*`` in the environment silently replaces parameters of RDMA.
        port: Port at which the engine listens; 0 lets the system choose. A port that is taken is refused, because the
            library would end the process.
    """

    backends: dict[str, dict[str, bool | int | str]] = msgspec.field(default_factory=lambda: {"RDMA": {}})
    port: int = 0

    def __post_init__(self) -> None:
        if not self.backends or not TRANSPORTS.issuperset(self.backends):
            raise ValueError(f"`backends` names some of {', '.join(sorted(TRANSPORTS))}, not {list(self.backends)}")
        for name in FIXED.keys() & {name for parameters in self.backends.values() for name in parameters}:
            raise ValueError(f"`{name}` is {FIXED[name]}")
        pairs = self.backends.get("RDMA", {}).get("qp_per_transfer", 1)
        if isinstance(pairs, int) and pairs < 1:
            raise ValueError(
                f"`qp_per_transfer` is at least 1, not {pairs}: MoRI starts, and then fails every transfer"
            )
        if not 0 <= self.port < 1 << 16 or self.port == 1:
            raise ValueError(f"`port` is 0 or 2 to 65535 (the library reserves 1), not {self.port}")

    @property
    def transports(self) -> frozenset[str]:
        """The transports that an engine may use. With 0 in the environment, the library adds XGMI to RDMA."""
        added = {"XGMI"} if "RDMA" in self.backends and os.environ.get(AUTO_XGMI, "").startswith("0") else set()
        return frozenset(name.lower() for name in self.backends.keys() | added)
