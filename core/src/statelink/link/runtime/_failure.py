"""The reason that an exception stands for."""

from __future__ import annotations

from statelink.errors import Reason, StatelinkError

__all__ = ["BackendDefect", "reason_of"]


class BackendDefect(Exception):
    """A backend raised what it must not raise, with that as its cause: nothing is known of what it was asked for."""


def reason_of(error: BaseException, **who: object) -> Reason:
    """The reason that an exception stands for; whatever is not ours is called a defect of whoever raised it."""
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
