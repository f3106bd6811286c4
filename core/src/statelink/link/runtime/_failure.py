"""Turns exceptions into reasons."""

from __future__ import annotations

from statelink.errors import Reason, StatelinkError

__all__ = ["BackendDefect", "reason_of"]


class BackendDefect(Exception):
    """A backend raised an exception that its contract does not allow; the cause of this one is that exception.

    It is not known what the backend did with the call.
    """


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
    cause = error.__cause__ if isinstance(error, BackendDefect) else None
    error = cause or error
    return Reason(
        "backend.defect",
        f"{type(error).__name__} was raised where only Statelink's own errors are expected",
        named,
        str(error)[:500],
    )
