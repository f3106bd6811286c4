"""What the native module exports."""

from __future__ import annotations

from .._status import StatusCode, TransferStatus

__all__ = ["StatusCode", "TransferStatus"]
