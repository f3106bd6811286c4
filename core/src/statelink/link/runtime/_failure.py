"""Turns exceptions into reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelink.errors import Reason, StatelinkError

if TYPE_CHECKING:
    from statelink.backend import Backend

__all__ = ["BackendDefect", "reason_of"]


class BackendDefect(Exception):
    """A backend did what its contract does not allow. It is not known what the backend did with the call.

    If it raised an exception, the cause of this one is that exception. Otherwise the text says what it did.
    """

    @classmethod
    def returned(cls, backend: Backend, said: str, found: object, expected: str) -> BackendDefect:
        """A defect for a value of the wrong type. ``said`` begins a clause whose object is the value."""
        return cls(f"backend {backend.name!r}: {said} {found!r:.60}, and not {expected}")


def reason_of(error: BaseException, **who: object) -> Reason:
    """The reason that an exception stands for. An exception that is not Statelink's own becomes ``backend.defect``.

    Args:
        error: The exception.
        who: Parties that the reason names, where the exception does not name them itself. Empty ones are left out.
    """
    named = {key: str(value) for key, value in who.items() if value}
    if isinstance(error, StatelinkError):
        reason = error.reason
        return Reason(reason.code, reason.what, {**named, **reason.who}, reason.cause, reason.hint)
    if isinstance(error, BackendDefect):
        if error.__cause__ is None:
            return Reason("backend.defect", "a value of the wrong type came from a backend", named, str(error)[:500])
        error = error.__cause__
    return Reason(
        "backend.defect",
        f"{type(error).__name__} was raised where only Statelink's own errors are expected",
        named,
        str(error)[:500],
    )
