"""What SGLang gets when a request's transfer failed."""

from __future__ import annotations

__all__ = ["VOTED", "TransferFailed"]

VOTED = "the vote of this server's ranks aborted the transfer; nothing had failed on this rank"
"""Why a request fails on a rank that has no reason of its own. SGLang looks for the word "abort" in such a text."""


class TransferFailed(Exception):
    """A request's state was not moved. SGLang logs the text, and sends it to the client.

    Attributes:
        failure_reason: The text.
        is_from_another_rank: Whether this rank's own part did not fail. SGLang then logs nothing here.
    """

    def __init__(self, room: object, reason: str) -> None:
        # Other servers have a part in the text. SGLang cannot send half a character, and would end.
        self.failure_reason = (reason or VOTED).encode("utf-8", "backslashreplace").decode()
        self.is_from_another_rank = not reason
        super().__init__(f"Statelink could not move the state of room {room}: {self.failure_reason}")
