"""Checks what a caller passes: numbers, seconds, texts and switches. Every public function uses these checks.

They take a number of Python, numpy or another library. They take no bool for a number, and nothing but a bool for a
switch. A value that is refused raises a `StatelinkError` that names the argument and shows the value.
"""

from __future__ import annotations

import math
import numbers
import operator
import threading
from typing import Any

from statelink.errors import RoomError, StateError, StatelinkError

__all__ = ["LONGEST_WAIT", "duration", "real", "shown", "switch", "text", "wait_time", "whole", "words"]

LONGEST_WAIT = threading.TIMEOUT_MAX / 4
"""Most seconds that a thread waits at once, more than seventy years. The system's clock takes no much larger number."""
MAX_TEXT = 1 << 16
"""Most characters of a text."""
PLAIN = (float, int)
"""Types of numbers that need no other look. A bool has another type."""


def shown(value: object) -> str:
    """A value for an error, in at most 80 characters. Does not fail, whatever the value's own methods do."""
    try:
        return f"{value!r:.80}"
    except Exception:  # such as that of a number with thousands of digits
        return f"something of type {type(value).__name__} that cannot be shown"


def words(value: object) -> str:
    """A value as text, such as a cause that an engine gives. Does not fail, whatever the value's own methods do."""
    try:
        return str(value)
    except Exception:
        return shown(value)


def whole(
    value: Any,
    what: str,
    low: int = -(1 << 64),
    high: int = 1 << 64,
    *,
    error: type[StatelinkError] = StateError,
    code: str | None = None,
) -> int:
    """``value`` as a Python integer from ``low`` to ``high``, both included.

    Args:
        value: A whole number of Python, or anything that converts to one without loss (``__index__``).
        what: What it was meant to be, for the error.
        low: The smallest that is allowed.
        high: The largest that is allowed.
        error: The error to raise.
        code: Its code; by default that of its class.

    Raises:
        StatelinkError: It is no whole number, a bool, or out of bounds.
    """
    if type(value) is int and low <= value <= high:
        return value
    number = _index(value)
    if number is None or not low <= number <= high:
        bounds = "" if low < 0 and number is None else f" from {low} to {_limit(high)}"
        raise error(f"{what} is {shown(value)}", cause=f"a whole number{bounds} is expected", code=code)
    return number


def real(value: Any) -> float | None:
    """``value`` as a float, which may be infinite; ``None`` if it is a bool, NaN, no real number, or too large."""
    if type(value) is float:
        return value if value == value else None
    if _is_bool(value):
        return None
    if getattr(value, "shape", None) == ():
        value = value.item()  # of a tensor or array of one number
    if not isinstance(value, numbers.Real):
        value = _index(value)
    try:
        number = None if value is None else float(value)
    except (OverflowError, ValueError, TypeError):
        return None
    return None if number is None or math.isnan(number) else number


def duration(value: Any, what: str, *, endless: bool = True, error: type[StatelinkError] = RoomError) -> float:
    """Seconds above zero, as a float.

    Args:
        value: What the caller passed.
        what: What it was meant to be, for the error.
        endless: Whether it may be infinite.
        error: The error to raise. A `RoomError` has the code ``room.number``.

    Raises:
        StatelinkError: It is no number above zero.
    """
    if type(value) in PLAIN and 0 < value <= LONGEST_WAIT:
        return float(value)
    seconds = real(value)
    if seconds is None or seconds <= 0 or (seconds == math.inf and not endless):
        cause = "seconds above zero are expected" + ("" if endless else ", and not without end")
        raise error(f"{what} is {shown(value)}", cause=cause, code="room.number" if error is RoomError else None)
    return seconds


def wait_time(value: Any) -> float:
    """Seconds that a thread may wait. Below zero they count as zero, and above `LONGEST_WAIT` as that.

    Raises:
        RoomError: It is no number (``room.number``).
    """
    if type(value) in PLAIN and 0 <= value <= LONGEST_WAIT:
        return float(value)
    seconds = real(value)
    if seconds is None:
        what = f"{shown(value)} was passed as the seconds to wait"
        raise RoomError(what, cause="a number is expected", code="room.number")
    return min(max(0.0, seconds), LONGEST_WAIT)


def text(value: Any, what: str, *, most: int = MAX_TEXT, error: type[StatelinkError] = StateError) -> str:
    """A text of at most ``most`` characters, each of which can be sent.

    Raises:
        StatelinkError: It is no text, too long, or has half a surrogate pair.
    """
    if not isinstance(value, str):
        raise error(f"{what} is {shown(value)}", cause="a text is expected")
    if len(value) > most:
        raise error(f"{what} has {len(value)} characters", cause=f"at most {most} are expected")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as wrong:
            # The text itself may be a secret.
            raise error(f"{what} has a character that cannot be sent", cause=wrong.reason) from None
    return value


def switch(value: Any, what: str, *, error: type[StatelinkError] = StateError) -> bool:
    """``True`` or ``False``, of Python or numpy.

    Raises:
        StatelinkError: It is something else, such as the text ``"false"``.
    """
    if value is True or value is False:
        return value
    if _is_bool(value) and not getattr(value, "shape", ()):
        return bool(value)
    raise error(f"{what} is {shown(value)}", cause="True or False is expected")


def _index(value: Any) -> int | None:
    if type(value) is int:
        return value
    if _is_bool(value):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # some libraries raise their own kinds for arrays
        return None


def _is_bool(value: Any) -> bool:
    """Whether it is a bool of Python, numpy or torch. The last two name their type, and are not imported here."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def _limit(high: int) -> str:
    """The largest number that is allowed, in words; a power of two where that is shorter."""
    exponent = (high + 1).bit_length() - 1
    if high > 1 << 31:
        if high + 1 == 1 << exponent:
            return f"2^{exponent} - 1"
        if high == 1 << (high.bit_length() - 1):
            return f"2^{high.bit_length() - 1}"
    return str(high)
