"""The text of the last error: one per thread, kept until it is cleared or another error replaces it."""

from __future__ import annotations

import threading

__all__ = ["failed", "get_and_clear_last_err_msg", "get_last_err_msg"]

_last = threading.local()


def failed(code: int, text: str) -> int:
    """``code``, with a text for it."""
    _last.text = text
    return code


def get_last_err_msg() -> str:
    """The last text of this thread; also after a later call that returned 0."""
    return getattr(_last, "text", "")


def get_and_clear_last_err_msg() -> str:
    """The same, once."""
    text = get_last_err_msg()
    _last.text = ""
    return text
