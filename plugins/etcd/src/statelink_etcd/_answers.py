"""What etcd's HTTP/JSON gateway answers. Fields have etcd's names; those that are zero are left out."""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ["Found", "Granted", "KeptAlive", "Pair", "Refusal", "Token", "Transacted", "Watched"]


MOST_WORDS = 200
"""Most characters of what etcd says that are passed on."""


class Header(msgspec.Struct):
    """Of every answer."""

    revision: int = 0


class Pair(msgspec.Struct):
    """A key and its value, both in base64."""

    key: str = ""
    value: str = ""
    mod_revision: int = 0
    lease: int = 0


class Found(msgspec.Struct):
    """Keys of a range."""

    header: Header = msgspec.field(default_factory=Header)
    kvs: list[Pair] = []
    more: bool = False


class Response(msgspec.Struct):
    """What one operation of a transaction gave."""

    response_range: Found | None = None


class Transacted(msgspec.Struct):
    """Which branch of a transaction was taken."""

    header: Header = msgspec.field(default_factory=Header)
    succeeded: bool = False
    responses: list[Response] = []


class Granted(msgspec.Struct):
    """A new lease."""

    ID: int
    TTL: int = 0


class Kept(msgspec.Struct):
    """A lease; its time is zero if it does not exist."""

    TTL: int = 0


class StreamError(msgspec.Struct):
    """Why a stream ended."""

    message: str = ""

    @property
    def words(self) -> str:
        """What etcd says."""
        return self.message.removeprefix("etcdserver: ")[:MOST_WORDS]


class KeptAlive(msgspec.Struct):
    """The only message of the stream that renews a lease, or why there is none."""

    result: Kept = msgspec.field(default_factory=Kept)
    error: StreamError | None = None


class Token(msgspec.Struct):
    """Proves a user. It becomes a header, so it has no character that would end one."""

    token: Annotated[str, msgspec.Meta(pattern=r"\A[!-~]{1,8192}\Z")]


class Refusal(msgspec.Struct):
    """Why a request failed."""

    code: int = 0
    message: str = ""
    error: str | StreamError = ""

    @property
    def words(self) -> str:
        """What etcd says."""
        other = self.error if isinstance(self.error, str) else self.error.message
        return (self.message or other).removeprefix("etcdserver: ")[:MOST_WORDS]


class Event(msgspec.Struct):
    """A change of a key."""

    kv: Pair
    type: str = "PUT"


class Changes(msgspec.Struct):
    """A message of a watch."""

    canceled: bool = False
    events: list[Event] = []


class Watched(msgspec.Struct):
    """A message of a watch, or why it ends."""

    result: Changes = msgspec.field(default_factory=Changes)
    error: StreamError | None = None
