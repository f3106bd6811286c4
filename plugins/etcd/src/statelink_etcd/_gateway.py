"""Speaks to etcd over its HTTP/JSON gateway: keys, leases, watches, users. Coroutines of one event loop."""

from __future__ import annotations

import asyncio
import base64
import errno
import os
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from statelink.rendezvous import MAX_RANKS, decode_json

from ._answers import Found, Granted, KeptAlive, Pair, Refusal, Token, Transacted, Watched

if TYPE_CHECKING:
    import aiohttp

__all__ = [
    "MOST_ANSWER_BYTES",
    "Change",
    "EtcdRefusedError",
    "EtcdSilentError",
    "Gateway",
    "LeaseEndedError",
    "Login",
    "Waits",
    "end_of",
    "key_in",
    "pack",
    "unpack",
]

CONNECT_SECONDS = 2.0
"""Seconds that a member of the cluster may take to connect."""
MOST_ANSWER_BYTES = 16 << 20
"""Most bytes of an answer, and of one message of a watch: 4 KiB for each rank of the largest instance."""
MOST_OBJECTS = 4 * MAX_RANKS
"""Most objects of JSON in them: a rank has at most three. Each takes memory and time while the process stands still."""
LEADERLESS = "does the cluster have a leader?"
CANCELLED, UNKNOWN, INVALID, DEADLINE, NOT_FOUND, INTERNAL, UNAVAILABLE, UNAUTHENTICATED = 1, 2, 3, 4, 5, 13, 14, 16
"""Status codes of gRPC that the gateway passes on."""
ELSEWHERE = frozenset({CANCELLED, UNKNOWN, DEADLINE, INTERNAL, UNAVAILABLE})
"""Codes after which another member may answer: this one stops, or has lost the cluster."""

Answer = TypeVar("Answer")


class EtcdSilentError(Exception):
    """No member of the cluster answers. The text says why, and `hint` what to look at."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint


class EtcdRefusedError(Exception):
    """The cluster answers, and refuses."""


class LeaseEndedError(EtcdRefusedError):
    """A lease does not exist any more."""


class Login(NamedTuple):
    """How a client proves who it is.

    Attributes:
        user: Name of the user; empty for none.
        password: The user's password.
        tls: What is trusted, and the client's own certificate; ``None`` without TLS.
    """

    user: str = ""
    password: str = ""
    tls: ssl.SSLContext | None = None


class Change(NamedTuple):
    """A key was written (``value``) or removed (``None``)."""

    key: str
    value: bytes | None


def pack(text: str | bytes) -> str:
    """Bytes as the gateway writes them."""
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def unpack(text: str) -> bytes:
    """Bytes that the gateway wrote.

    Raises:
        EtcdSilentError: It is no gateway of etcd that answers.
    """
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise _foreign(str(error)) from error


def key_in(pair: Pair) -> str:
    """The key of a pair. Bytes that are no text, which anybody may have written, are shown as escapes.

    Raises:
        EtcdSilentError: It is no gateway of etcd that answers.
    """
    return unpack(pair.key).decode(errors="backslashreplace")


def end_of(prefix: str) -> str:
    """The end of the range of all keys that begin with ``prefix``."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


class Waits(NamedTuple):
    """How long a client of etcd waits, in seconds.

    Attributes:
        answer: For a member's answer.
        refresh: For the next message of a watch. A watch that says nothing for so long is taken for dead, and replaced
            by another one.
        forget: For somebody to ask for an instance again. After that the instance is not followed any more.
    """

    answer: float = 6.0
    refresh: float = 10.0
    forget: float = 10.0


class Gateway:
    """A client of a cluster. Asks one member, and the next one when that does not answer.

    Args:
        members: Base URLs of the members, ``http://host:port``.
        login: How the client proves who it is.
        waits: How long it waits for members.
    """

    def __init__(self, members: Sequence[str], login: Login, waits: Waits) -> None:
        import aiohttp  # only a link that uses etcd needs it

        self._aiohttp = aiohttp
        self._members = deque(members)
        self._login = login
        self._waits = waits
        self._token = ""
        self._answer = aiohttp.ClientTimeout(total=waits.answer, sock_connect=CONNECT_SECONDS)
        # A watch keeps its connection for itself.
        connector = aiohttp.TCPConnector(limit=0, ssl=login.tls or False)
        # No proxy of the environment must come between, and no cookie is kept. Nobody unpacks what is compressed,
        # because the sender chooses how long that becomes.
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={"Accept-Encoding": "identity"},
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=self._answer,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    # Keys.

    async def range(self, key: str | bytes, end: str = "", *, limit: int = 0) -> Found:
        """The key, or all keys from ``key`` up to ``end``, in order."""
        body: dict[str, Any] = {"key": pack(key), "limit": limit}
        if end:
            body["range_end"] = pack(end)
        return await self._ask("/v3/kv/range", body, Found)

    async def holds(self, key: str, value: bytes, lease: int) -> Pair | bool | None:
        """``True`` if the key has this value and lease; otherwise what it has, or ``None`` if it does not exist."""
        compare = [
            {"key": pack(key), "result": "EQUAL", "target": "VALUE", "value": pack(value)},
            {"key": pack(key), "result": "EQUAL", "target": "LEASE", "lease": str(lease)},
        ]
        otherwise = [{"request_range": {"key": pack(key)}}]
        body = {"compare": compare, "success": [], "failure": otherwise}
        answer = await self._ask("/v3/kv/txn", body, Transacted)
        if answer.succeeded:
            return True
        pairs = [pair for each in answer.responses if each.response_range for pair in each.response_range.kvs]
        return pairs[0] if pairs else None

    async def put(self, key: str, value: bytes, lease: int, *, after: int) -> bool:
        """Write a key that expires with a lease. Returns whether that was possible.

        Args:
            key: The key.
            value: Its value.
            lease: The lease.
            after: The revision at which the key was last changed, as far as the caller knows; 0 if it does not exist.
                If it has changed since, nothing is written.
        """
        compare = {"key": pack(key), "result": "EQUAL", "target": "MOD", "mod_revision": str(after)}
        write = {"request_put": {"key": pack(key), "value": pack(value), "lease": str(lease)}}
        answer = await self._ask("/v3/kv/txn", {"compare": [compare], "success": [write]}, Transacted)
        return answer.succeeded

    # Leases.

    async def grant(self, seconds: int) -> Granted:
        """Grant a lease."""
        return await self._ask("/v3/lease/grant", {"TTL": str(seconds)}, Granted)

    async def keep_alive(self, lease: int) -> bool:
        """Renew a lease. Returns whether it still exists."""
        answer = await self._ask("/v3/lease/keepalive", {"ID": str(lease)}, KeptAlive)
        if answer.error is not None:
            self.next()
            raise EtcdSilentError(f"it says: {answer.error.words}", LEADERLESS)
        return answer.result.TTL > 0

    async def revoke(self, lease: int) -> None:
        """End a lease, and remove the keys that it holds."""
        await self._ask("/v3/lease/revoke", {"ID": str(lease)}, Refusal)

    # Watches.

    async def watch(self, prefix: str, revision: int) -> AsyncIterator[list[Change]]:
        """Changes of all keys that begin with ``prefix``, from a revision on. Ends when the keys have to be read again.

        Raises:
            EtcdSilentError: The member does not answer, or has lost the cluster.
            EtcdRefusedError: It refuses the watch.
        """
        request = {"key": pack(prefix), "range_end": pack(end_of(prefix)), "start_revision": str(revision)}
        timeout = self._aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=self._waits.refresh)
        # With this header, a member that has lost the cluster ends the watch.
        headers = {**self._headers(), "Grpc-Metadata-hasleader": "true"}
        try:
            async with self._session.post(
                f"{self._members[0]}/v3/watch",
                json={"create_request": request},
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                _check(response)
                if response.status != 200:
                    raise self._refusal(response.status, await _body(response))
                async for line in _lines(response):
                    message = _read(line, Watched)
                    if message.error is not None:
                        raise EtcdSilentError(f"it ends the watch: {message.error.words}", LEADERLESS)
                    if message.result.canceled:
                        return  # compacted, or the user may not watch any more: the caller reads the keys again
                    if message.result.events:
                        yield [
                            Change(key_in(each.kv), unpack(each.kv.value) if each.type == "PUT" else None)
                            for each in message.result.events
                        ]
        except self._aiohttp.SocketTimeoutError:
            return
        except (self._aiohttp.ClientError, asyncio.TimeoutError) as error:
            self.next()
            raise _silent(error) from error

    def next(self) -> None:
        """Ask another member from now on."""
        self._members.rotate(-1)

    # Questions and answers.

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}

    async def _ask(self, path: str, body: Mapping[str, Any], kind: type[Answer]) -> Answer:
        """Ask the members in turn, until one answers.

        Raises:
            EtcdSilentError: None does.
            EtcdRefusedError: One refuses.
        """
        trouble: EtcdSilentError | None = None
        for _ in range(len(self._members)):
            try:
                return _read(await self._post(path, body), kind)
            except EtcdSilentError as error:
                trouble = error
            self._members.rotate(-1)
        assert trouble is not None
        raise trouble

    async def _send(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Ask one member; the HTTP status and the body of its answer."""
        try:
            async with self._session.post(
                f"{self._members[0]}{path}", json=body, headers=headers, allow_redirects=False
            ) as response:
                _check(response)
                return response.status, await _body(response)
        except (self._aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise _silent(error) from error

    async def _post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Ask one member. Logs in where that is necessary."""
        fresh = False
        while True:
            if self._login.user and not self._token:
                await self._log_in()
                fresh = True
            status, raw = await self._send(path, body, self._headers())
            if status == 200:
                return raw
            refused = self._refusal(status, raw)
            if not isinstance(refused, _TokenError) or fresh:
                raise refused
            self._token = ""  # it has expired, or users were changed

    async def _log_in(self) -> None:
        login = {"name": self._login.user, "password": self._login.password}
        status, raw = await self._send("/v3/auth/authenticate", login, {})
        if status != 200:
            raise self._refusal(status, raw)
        self._token = _read(raw, Token).token

    def _refusal(self, status: int, raw: bytes) -> Exception:
        """Why a member did not do what it was asked."""
        try:
            said = _read(raw, Refusal)
        except EtcdSilentError:
            words = raw.decode(errors="replace").strip()
            if status == 400 and words and len(words) < 200:  # of the gateway itself, not of the server behind it
                return EtcdRefusedError(words)
            return _foreign(f"HTTP status {status}")
        if said.code == UNAUTHENTICATED or (said.code == INVALID and "revision" in said.words):
            return _TokenError(said.words)
        if said.code in ELSEWHERE:
            return EtcdSilentError(f"it says: {said.words}", LEADERLESS)
        if said.code == NOT_FOUND and "lease" in said.words:
            return LeaseEndedError(said.words)
        return EtcdRefusedError(said.words or f"HTTP status {status}")


class _TokenError(EtcdRefusedError):
    """The token is not valid, or not any more."""


def _check(response: aiohttp.ClientResponse) -> None:
    """Refuse an answer that is to be asked for elsewhere, or to be unpacked."""
    if 300 <= response.status < 400:
        raise _foreign(f"it sends this link elsewhere (HTTP status {response.status})")
    coding = response.headers.get("Content-Encoding", "identity")
    if coding != "identity":
        raise _foreign(f"its answer is compressed ({coding:.40})")


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """The whole body."""
    body = bytearray()
    async for part in response.content.iter_any():
        _extend(body, part)
    return bytes(body)


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The lines of a body that does not end."""
    line = bytearray()
    async for part in response.content.iter_any():
        *ends, rest = part.split(b"\n")
        for end in ends:
            _extend(line, end)
            if line:
                yield bytes(line)
            line.clear()
        _extend(line, rest)


def _extend(held: bytearray, part: bytes) -> None:
    held += part
    if len(held) > MOST_ANSWER_BYTES:
        raise _foreign(f"a message of more than {MOST_ANSWER_BYTES} bytes")


def _read(raw: bytes, kind: type[Answer]) -> Answer:
    """An answer. The gateway writes 64-bit numbers as texts, and leaves out what is zero."""
    if raw.count(b"{") > MOST_OBJECTS:
        raise _foreign(f"a message of more than {MOST_OBJECTS} objects")
    try:
        return decode_json(raw, kind, strict=False)
    except ValueError as error:
        raise _foreign(str(error)) from error


def _foreign(why: str) -> EtcdSilentError:
    return EtcdSilentError(f"what answers is no gateway of etcd: {why:.120}", "is that a client port of etcd?")


def _silent(error: BaseException) -> EtcdSilentError:
    """Why a member was not reached, from what the HTTP client raised."""
    import aiohttp

    if isinstance(error, ssl.SSLCertVerificationError):
        why = f"its certificate is not trusted: {getattr(error, 'verify_message', '') or error}"
        return EtcdSilentError(why, "does 'ca_file' have its authority, and the certificate this host name?")
    if isinstance(error, ssl.SSLError):
        return EtcdSilentError(f"TLS fails: {error}", "do both sides speak TLS? Does it want a certificate?")
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return _of_number(errno.ETIMEDOUT)
    if isinstance(error, asyncio.TimeoutError):
        return EtcdSilentError("it takes connections and does not answer", "is its process stopped, or overloaded?")
    cause = getattr(error, "os_error", error)
    if isinstance(cause, socket.gaierror) or isinstance(error, aiohttp.ClientConnectorDNSError):
        return EtcdSilentError("its host name is not known here", "is the name right? Can this machine resolve it?")
    if isinstance(cause, OSError) and cause.errno:
        return _of_number(cause.errno)
    return EtcdSilentError("it ends the connection", "is that a client port of etcd, with TLS or without?")


def _of_number(number: int) -> EtcdSilentError:
    if number == errno.ECONNREFUSED:
        return EtcdSilentError("the connection is refused: nothing listens there", "does etcd run, and listen there?")
    if number in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
        hint = "is the address right, its machine up, and no firewall in between?"
        return EtcdSilentError("nobody answers the attempt to connect", hint)
    return EtcdSilentError(
        f"the connection broke: {os.strerror(number)}", "is that a client port of etcd, with TLS or without?"
    )
