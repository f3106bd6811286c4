"""Decodes JSON that another process has written."""

from __future__ import annotations

from typing import TypeVar

import msgspec

__all__ = ["decode_json"]

Decoded = TypeVar("Decoded")


def decode_json(raw: bytes | msgspec.Raw, kind: type[Decoded], *, strict: bool = True) -> Decoded:
    """Decode JSON of a kind that ``msgspec`` knows. Does not block. Thread-safe.

    The caller bounds the length of ``raw``, because time and memory grow with it.

    Args:
        raw: What the other process has written.
        kind: What it should be.
        strict: Whether a number must be written as a number. Otherwise it may be a text that is one.

    Raises:
        ValueError: It is something else. The text says what is wrong.
    """
    try:
        return msgspec.json.decode(raw, type=kind, strict=strict)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except msgspec.MsgspecError as error:  # text that is not UTF-8 is a ValueError already
        raise ValueError(str(error)) from error
