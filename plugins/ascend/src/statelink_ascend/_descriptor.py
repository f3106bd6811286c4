"""The descriptor. This module needs no library."""

from __future__ import annotations

from statelink.backend.native import Located

__all__ = ["Descriptor"]


class Descriptor(Located, frozen=True, array_like=True):
    """What a peer needs to reach this engine.

    Attributes:
        role: ``Prefill`` or ``Decode``.
        kind: Name of the kind of transfer.
        door: On decode, the port of its `Door`; otherwise 0.
    """

    BACKEND = "ascend"
    LIBRARY = "MemFabric"

    role: str
    kind: str
    door: int

    def check(self) -> None:
        """See `statelink.backend.native.Descriptor.check`."""
        super().check()
        if (self.door or self.role == "Decode") and not 0 < self.door < 1 << 16:
            raise ValueError(f"has a door at port {self.door}")

    def fits(self, role: str, kind: str) -> str:
        """Why an engine of this role and kind cannot reach it, or nothing."""
        if {self.role, role} != {"Prefill", "Decode"}:
            return f"its role is {self.role}, ours is {role}, and MemFabric connects a Prefill to a Decode"
        return "" if self.kind == kind else f"it moves bytes by {self.kind}, we by {kind}"
