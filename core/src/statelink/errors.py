"""Every error that Statelink raises, and the reason that is sent to the other side.

The tree::

    StatelinkError
    ├── ConfigError                 an option or a configuration key is wrong
    ├── BackendError
    │   ├── UnknownBackendError     no such name, or known but not installed
    │   ├── BackendLoadError        installed, but its import or entry point failed
    │   ├── BackendIncompatibleError  written for another plugin API
    │   ├── BackendUnavailableError   its probe says that it cannot run here
    │   ├── UnsupportedError        asked for what the backend does not declare
    │   └── TransferError           the library could not do what it was asked to
    ├── StateError                  a description of state contradicts itself
    ├── MismatchError               two sides do not describe the same state
    ├── WireError                   a frame that does not decode, or is out of bounds
    ├── PeerError                   a peer refused, is unreachable, or was lost
    ├── RoomError                   a request was used wrongly, or failed
    └── ClosedError                 the link or room was closed

All error texts have the same form: what failed, whom it concerns, the cause, and on a line of its own a hint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, TypeVar

import msgspec

__all__ = [
    "BackendError",
    "BackendIncompatibleError",
    "BackendLoadError",
    "BackendUnavailableError",
    "ClosedError",
    "ConfigError",
    "MismatchError",
    "PeerError",
    "Reason",
    "RoomError",
    "StateError",
    "StatelinkError",
    "TransferError",
    "UnknownBackendError",
    "UnsupportedError",
    "WireError",
]


MAX_SHORT, MAX_TEXT = 256, 8192
Short = Annotated[str, msgspec.Meta(max_length=MAX_SHORT)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]

_Error = TypeVar("_Error", bound="StatelinkError")


class Reason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why something failed. It can be sent to the other side.

    Attributes:
        code: Stable error code, such as ``room.deadline``; each has an entry in the error documentation.
        what: What failed, in one clause.
        who: Name/value pairs that say whom it concerns (backend, peer, rank, room, component, ...).
        cause: Why it failed, as exactly as is known.
        hint: What the reader can do about it; may be empty.
        diagnostics: The state of a room when it failed, on the side where the reason arose: its ``side``,
            ``status`` and ``peer``, the peer's ``rank``, what was ``missing``, and when the peer was last ``heard``.
            Empty elsewhere.
    """

    code: Short
    what: Text
    who: Annotated[dict[Short, Text], msgspec.Meta(max_length=32)] = {}
    cause: Text = ""
    hint: Text = ""
    diagnostics: Annotated[dict[Short, Text], msgspec.Meta(max_length=16)] = {}

    def clipped(self) -> Reason:
        """The same reason, cut to the lengths that may be sent, with only characters that can be sent."""
        return Reason(
            _sendable(self.code, MAX_SHORT),
            _sendable(self.what, MAX_TEXT),
            _sendable_pairs(self.who, 32),
            _sendable(self.cause, MAX_TEXT),
            _sendable(self.hint, MAX_TEXT),
            _sendable_pairs(self.diagnostics, 16),
        )

    @property
    def clause(self) -> str:
        """What failed, and why, without the rest: to be put into another text."""
        return f"{self.what}: {self.cause}" if self.cause else self.what

    @property
    def coded(self) -> str:
        """The code and the whole text: for a log."""
        return f"{self.code}: {self}"

    def __str__(self) -> str:
        who = ", ".join(f"{key} {value}" for key, value in self.who.items())
        text = f"{self.what} ({who})" if who else self.what
        if self.cause:
            text = f"{text}: {self.cause}"
        if self.diagnostics:
            named = {"peer's rank" if key == "rank" else key: value for key, value in self.diagnostics.items()}
            text = f"{text}\nat failure: {', '.join(f'{key} {value}' for key, value in named.items())}"
        if self.hint:
            text = f"{text}\nhint: {self.hint}"
        return text


def _sendable(text: str, longest: int) -> str:
    return str(text)[:longest].encode("utf-8", "backslashreplace").decode()[:longest]


def _sendable_pairs(pairs: Mapping[str, str], most: int) -> dict[str, str]:
    return {_sendable(key, MAX_SHORT): _sendable(value, MAX_TEXT) for key, value in list(pairs.items())[:most]}


class StatelinkError(Exception):
    """Root of every error raised by Statelink.

    Args:
        what: What failed, in one clause.
        cause: Why it failed, as exactly as is known.
        hint: What the reader can do about it.
        code: Stable code; by default that of the class.
        **who: Whom it concerns; ``None`` values are left out.
    """

    default_code: ClassVar[str] = "statelink"

    def __init__(
        self,
        what: str,
        *,
        cause: str = "",
        hint: str = "",
        code: str | None = None,
        **who: object,
    ) -> None:
        named = {key.rstrip("_"): str(value) for key, value in who.items() if value is not None}
        self.reason = Reason(code or self.default_code, what, named, cause, hint)
        super().__init__(str(self.reason))

    @classmethod
    def of(cls: type[_Error], reason: Reason) -> _Error:
        """An error of this class with the given reason."""
        error = cls(reason.what, cause=reason.cause, hint=reason.hint, code=reason.code)
        error.reason = reason
        error.args = (str(reason),)
        return error

    @property
    def code(self) -> str:
        """Stable error code."""
        return self.reason.code

    @property
    def hint(self) -> str:
        """What the reader can do about it; may be empty."""
        return self.reason.hint


class ConfigError(StatelinkError, ValueError):
    """An option or a configuration key is unknown, missing, or of the wrong type."""

    default_code = "config"


class BackendError(StatelinkError):
    """Something is wrong with a backend plugin."""

    default_code = "backend"


class UnknownBackendError(BackendError, LookupError):
    """No installed backend has that name."""

    default_code = "backend.unknown"


class BackendLoadError(BackendError):
    """An installed backend could not be imported, or its entry point is not a backend."""

    default_code = "backend.load"


class BackendIncompatibleError(BackendError):
    """A backend was written for a version of the plugin API that this core does not support."""

    default_code = "backend.incompatible"


class BackendUnavailableError(BackendError):
    """A backend's probe says that it cannot run on this machine."""

    default_code = "backend.unavailable"


class UnsupportedError(BackendError):
    """Something was asked of a backend that its capabilities do not declare."""

    default_code = "backend.unsupported"


class TransferError(BackendError):
    """A transfer library could not do what it was asked to."""

    default_code = "backend.transfer"


class StateError(StatelinkError, ValueError):
    """A description of state contradicts itself or leaves its memory."""

    default_code = "state"


class MismatchError(StatelinkError, ValueError):
    """Two sides do not describe the same state. The error lists every field that differs."""

    default_code = "mismatch"


class WireError(StatelinkError, ValueError):
    """A frame does not decode, or a count, size or product in it is out of bounds."""

    default_code = "wire"


class PeerError(StatelinkError):
    """A peer refused this link, cannot be reached, or was lost."""

    default_code = "peer"


class RoomError(StatelinkError):
    """A request was used wrongly, or failed."""

    default_code = "room"


class ClosedError(StatelinkError, RuntimeError):
    """The link or the room was closed before the call."""

    default_code = "closed"
