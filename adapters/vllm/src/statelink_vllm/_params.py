"""The field ``kv_transfer_params``: what a router passes from prefill to decode, or to both.

A serial router hands prefill's answer to decode as it is. A concurrent one gives both the same ``transfer_id``, and
decode the name of the prefill instance.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from ._options import Options

__all__ = ["Source", "answer", "content_in", "room_of", "source_of"]

ADDRESS = "tcp://"
"""A text that begins with this is addresses, and a link dials them. It looks up every other text as a name."""


class Source(NamedTuple):
    """Where the state of a request comes from.

    Attributes:
        room: The id of the request between the servers.
        peer: The prefill instance: its name, or the addresses of its ranks.
    """

    room: int
    peer: str | tuple[str, ...]


def room_of(params: Mapping[str, Any]) -> int:
    """The id that both servers give a request: from the router's id, or drawn by prefill. 63 bits, and not zero."""
    transfer = params.get("transfer_id")
    if transfer is None:
        return secrets.randbelow((1 << 63) - 1) + 1
    digest = hashlib.blake2b(str(transfer).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 1) or 1


def answer(room: int, engine_id: str, addresses: Sequence[str], content: bytes) -> dict[str, Any]:
    """What prefill answers, and a serial router hands to decode. The room is text: JSON may round large numbers."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "room": str(room),
        "peer": list(addresses),
        "content": content.hex(),
    }


def content_in(params: Mapping[str, Any]) -> bytes:
    """Which request prefill's answer was for; empty if a router passed no such answer on.

    Raises:
        ValueError: It is no content.
    """
    given = params.get("content")
    if given is None:
        return b""
    try:
        return bytes.fromhex(given)
    except (TypeError, ValueError):
        raise ValueError(f"its 'content' is {given!r:.80}, and no hexadecimal text") from None


def source_of(params: Mapping[str, Any], options: Options) -> Source:
    """Read what a router passed to decode.

    Raises:
        ValueError: It names no prefill server, or one that the configuration does not admit.
    """
    room = _room(params)
    name = params.get("remote_engine_id")
    if options.addressed_by_name:
        if not isinstance(name, str) or not name:
            raise ValueError("it has no 'remote_engine_id', by which the configuration finds prefill")
        if name.startswith(ADDRESS):
            raise ValueError("its 'remote_engine_id' is an address, and the configuration finds prefill by name")
        return Source(room, name)
    given = params.get("peer")
    addresses = tuple(given) if isinstance(given, (list, tuple)) else ()
    if not addresses or not all(isinstance(each, str) for each in addresses):
        raise ValueError("it has no 'peer', a list of addresses, and no prefill server is configured by name")
    if not options.link.insecure and options.link.keys is None:
        for each in addresses:
            if not _on_loopback(each):
                raise ValueError(f"its 'peer' has {each!r:.80}, and without keys only loopback addresses are admitted")
    return Source(room, addresses)


def _room(params: Mapping[str, Any]) -> int:
    given = params.get("room")
    if given is None:
        if params.get("transfer_id") is None:
            raise ValueError("it has neither a 'room' nor a 'transfer_id'")
        return room_of(params)
    try:
        room = int(given)
    except (TypeError, ValueError):
        raise ValueError(f"its 'room' is {given!r:.80}, and no number") from None
    if not 0 < room < 1 << 64:
        raise ValueError(f"its 'room' is {room}, and has to be above 0 and below 2^64")
    return room


def _on_loopback(address: str) -> bool:
    host = urlsplit(address.partition("@")[0]).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
