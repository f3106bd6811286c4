"""Whether both sides hold the same request, by the content that each of them states."""

from __future__ import annotations

from statelink.errors import MismatchError

__all__ = ["differing"]


def differing(prefill: bytes, decode: bytes) -> MismatchError:
    """The error for two contents that differ, of which one may be empty: its side states none."""
    if prefill and decode:
        return MismatchError(
            "the two sides hold different requests",
            cause=f"content {prefill.hex()} on prefill, {decode.hex()} on decode",
            hint="give both servers the same prompt, adapter, items and salt: look at the router, which may have mixed "
            "two requests up, and at tokenizers and chat templates",
            code="room.content",
        )
    said = f"{prefill.hex()} on prefill, none on decode" if prefill else f"none on prefill, {decode.hex()} on decode"
    return MismatchError(
        "one side alone states the content of the request",
        cause=f"content {said}",
        hint="pass content= to send() and to receive(), or to neither",
        code="room.content",
    )
