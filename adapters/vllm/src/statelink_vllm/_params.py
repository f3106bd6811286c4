"""The field ``kv_transfer_params``: what a router passes from prefill to decode, or to both.

A serial router hands prefill's answer to decode as it is. A concurrent one gives both the same ``transfer_id``, and
decode the name of the prefill instance. Any client can write the field, and JSON can hold anything in any place. So
`wanted` reads every value strictly, and never fails.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, NamedTuple

from ._options import LONGEST_HOLD

if TYPE_CHECKING:
    from ._options import Options
    from ._places import Place

__all__ = ["LONGEST_ID", "Prefix", "Source", "Wanted", "answer", "failure", "fresh_room", "held", "refusal", "wanted"]

ADDRESS = re.compile(
    r"tcp://(?P<host>[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._-]{1,32})?\])"
    r":(?P<port>[0-9]{1,5})(?:@[A-Za-z0-9_-]{43})?"
)
"""An address of a link. What a client writes is dialled, so nothing else may stand in it: ZeroMQ reads
``tcp://127.0.0.1:0;10.0.0.9:80`` as the address 10.0.0.9."""
MOST_ADDRESSES = 512
"""Most ranks of a prefill instance. Decode opens a connection to each, and they have to leave room for others."""
LONGEST_NAME = 256
"""Most characters of the name of an instance."""
LONGEST_ID = 1024
"""Most characters of a ``transfer_id``."""
MOST_TOKENS = 1 << 32
MOST_PREFIXES = 16
"""Most shorter prefixes that an answer may offer. Each is compared with the request."""
DIGITS = re.compile(r"[0-9]{1,20}")
CONTENT = re.compile(r"(?:[0-9a-fA-F]{2}){1,64}")
IN_LIST = "it is not the first of a list of prompts, and vLLM has one 'kv_transfer_params' for the whole list"
IN_RANKS = (
    "it has several answers ('n'), and vLLM spreads them over ranks of data parallelism: "
    "what it answers may name another rank than the one that has the state"
)
IN_ANSWERS = "it is not the first of several answers to one prompt ('n'), and the first one receives the state"


class Prefix(NamedTuple):
    """First tokens of a request, for which a server has state.

    Attributes:
        room: The id under which this state is sent.
        tokens: How many tokens these are.
        content: Which tokens, and what else decides their state.
    """

    room: int
    tokens: int
    content: bytes


class Source(NamedTuple):
    """Where the state of a request comes from.

    Attributes:
        room: The id of the request between the servers.
        peer: The prefill instance: its name, or the addresses of its ranks.
    """

    room: int
    peer: str | tuple[str, ...]


class Wanted(NamedTuple):
    """What a request wants of this server, as far as the server does it.

    Attributes:
        source: Where its state comes from; ``None`` if nothing is received.
        answered: Which request prefill's answer was for; empty if a router passed no such answer on.
        offered: The prefixes for which the other server has state, the longest first; empty if it did not say.
        tokens: For how many of the request's first tokens state comes; 0 for all of its prompt that can be used.
        room: The id under which its state goes to decode; 0 if nothing is sent.
        known: Whether decode may know the id before this server answers.
        another: Whether another answer to the same prompt sends the state, under the same id.
        several: Whether there are other answers to the same prompt. Then its state alone is sent.
        hold: For how many seconds the state is kept for a turn of the conversation to come; 0 if it is not asked for.
        cached: Whether state is sent only for as much of the prompt as this server's own cache has.
        extend: The room of a held state that is to be held for so long from now; 0 if it asks for nothing of the kind.
        as_vllm: Whether the answer has the form of vLLM's own connector, for a router that knows that one.
        cut: Whether the last tokens of the prompt were left out.
        moved: Whether its state is sent only because it moves to another server.
        not_received: Why nothing is received, although the request wants it; empty otherwise.
        not_sent: The same for what is sent.
        usual: Whether both are as vLLM's own interface has it, and nobody made a mistake.
    """

    source: Source | None = None
    answered: bytes = b""
    offered: tuple[Prefix, ...] = ()
    tokens: int = 0
    room: int = 0
    known: bool = False
    another: bool = False
    several: bool = False
    hold: float = 0.0
    cached: bool = False
    extend: int = 0
    as_vllm: bool = False
    cut: bool = False
    moved: bool = False
    not_received: str = ""
    not_sent: str = ""
    usual: bool = False


def wanted(params: Any, place: Place, options: Options, secret: bytes, *, spread: bool = False) -> Wanted:
    """Read what a router or a client wrote. Never fails, whatever that is.

    Args:
        params: The field, decoded from JSON.
        place: The place of the request in what the client asked for.
        options: What the operator configured.
        secret: A key of this process, for ids that several requests work out and no client can guess.
        spread: Whether other ranks may have other answers to the same prompt.
    """
    if params is None:
        return Wanted()
    if not isinstance(params, Mapping):
        why = f"they are {_shown(params)}, and no object"
        return Wanted(not_received=why, not_sent=why)
    made = Wanted()
    try:
        if params.get("extend") is not None:
            hold = options.hold if params.get("hold") is None else _hold(params, options)
            return made._replace(extend=_number_of_room(params["extend"], "extend"), hold=hold)
        sends, receives = _flag(params, "do_remote_decode"), _flag(params, "do_remote_prefill")
    except ValueError as error:
        return Wanted(not_received=str(error), not_sent=str(error))
    # vLLM's own connector answers so for a turn to come: prefill sends, and has a count of tokens to receive, too.
    receives = receives or (sends and params.get("remote_num_tokens") is not None)
    if receives:
        try:
            made = _receiving(made, params, place, options)
        except ValueError as error:
            made = made._replace(not_received=str(error))
        if options.every and not sends and made.source is not None and not place.several:
            made = made._replace(room=fresh_room(), hold=options.hold, as_vllm=True)
    if sends:
        try:
            made = _sending(made, params, place, options, secret, spread=spread)
        except ValueError as error:
            made = made._replace(not_sent=str(error))
    return made


def answer(
    prefixes: Sequence[Prefix], engine_id: str, addresses: Sequence[str], *, as_vllm: bool = False
) -> dict[str, Any]:
    """What a server answers that sends state, and a serial router hands to the next one.

    Args:
        prefixes: For which of the request's first tokens it has state, the longest first.
        engine_id: The name of this instance.
        addresses: Addresses of the links of all its ranks.
        as_vllm: Whether it is for prefill in a turn to come, in the form of vLLM's own connector.
    """
    longest, *shorter = map(_offer, prefixes)
    made: dict[str, Any] = {
        "do_remote_prefill": not as_vllm,
        "do_remote_decode": as_vllm,
        "remote_engine_id": engine_id,
        "peer": list(addresses),
        **longest,
    }
    if as_vllm:
        made["remote_num_tokens"] = made["tokens"]
    return {**made, "prefixes": shorter} if shorter else made


def _offer(prefix: Prefix) -> dict[str, Any]:
    # The room is text: JSON may round large numbers.
    return {"room": str(prefix.room), "tokens": prefix.tokens, "content": prefix.content.hex()}


def held(seconds: float) -> dict[str, Any]:
    """What a server answers that has been asked to hold a state for longer, or no longer."""
    return {"do_remote_prefill": False, "do_remote_decode": False, "held": seconds}


def refusal(why: str) -> dict[str, Any]:
    """What a server answers that does not send the state. Decode then computes the prompt, and the router sees why."""
    return {"do_remote_prefill": False, "do_remote_decode": False, "refused": why}


def failure(params: Any) -> str:
    """Why a request only tells decode that no state comes; empty for any other request.

    The server has failed another request behind its answer, and this one has the same prompt and id.
    """
    given = params.get("failed") if isinstance(params, Mapping) else None
    return given[:LONGEST_ID] if isinstance(given, str) else ""


def _receiving(made: Wanted, params: Mapping[str, Any], place: Place, options: Options) -> Wanted:
    if options.link.role == "prefill":
        raise ValueError("they have 'do_remote_prefill', and a server with the kv_role 'kv_producer' receives nothing")
    room, peer, answered = _room(params, place), _peer(params, options), _content(params)
    if place.prompt and params.get("room") is not None:
        return made._replace(not_received=IN_LIST, usual=True)
    if place.answer:
        return made._replace(not_received=IN_ANSWERS, usual=True)
    return made._replace(source=Source(room, peer), answered=answered, offered=_offered(params, room, answered))


def _sending(
    made: Wanted, params: Mapping[str, Any], place: Place, options: Options, secret: bytes, *, spread: bool
) -> Wanted:
    if options.link.role == "decode":
        raise ValueError("they have 'do_remote_decode', and a server with the kv_role 'kv_consumer' sends nothing")
    made = made._replace(hold=_hold(params, options), cached=_flag(params, "cached"))
    transfer = _transfer(params)
    # A router that gives an id may have named the rank, and passes no answer on.
    if spread and place.several and (place.answer or not transfer):
        return made._replace(not_sent=IN_RANKS, usual=True)
    shared = _shared(transfer, place) if transfer else 0
    # Under the id of the router's, a server that also receives may receive.
    if shared and (made.source is None or made.source.room != shared):
        return made._replace(room=shared, known=True, another=place.answer > 0, several=place.several)
    if place.prompt:
        return made._replace(not_sent=IN_LIST, usual=True)
    if not place.several:
        return made._replace(room=fresh_room())
    # vLLM answers with what the last of them said, so all of them say the same.
    room = _number(hashlib.blake2b(place.name.encode(errors="surrogatepass"), key=secret, digest_size=8))
    return made._replace(room=room, known=True, another=place.answer > 0, several=True)


def fresh_room() -> int:
    """An id that no client can guess."""
    return secrets.randbelow((1 << 63) - 1) + 1


def _offered(params: Mapping[str, Any], room: int, content: bytes) -> tuple[Prefix, ...]:
    """What the answer of another server offers; nothing if it does not say of how many tokens it has state."""
    if params.get("tokens") is None or not content:
        return ()
    shorter = params.get("prefixes")
    if shorter is None:
        shorter = ()
    if not isinstance(shorter, (list, tuple)) or len(shorter) > MOST_PREFIXES:
        raise ValueError(f"their 'prefixes' is {_shown(shorter)}, and no list of at most {MOST_PREFIXES} objects")
    made = [Prefix(room, _tokens(params), content)]
    for each in shorter:
        if not isinstance(each, Mapping) or each.get("room") is None:
            raise ValueError(f"their 'prefixes' has {_shown(each)}, and no object with 'room', 'tokens' and 'content'")
        made.append(Prefix(_number_of_room(each["room"]), _tokens(each), _content(each)))
    return tuple(sorted(made, key=lambda each: -each.tokens))


def _hold(params: Mapping[str, Any], options: Options) -> float:
    """For how many seconds a router wants the state to be kept."""
    given = params.get("hold")
    if given is None or isinstance(given, bool):
        return options.hold if given else 0.0
    if not isinstance(given, (int, float)) or not 0 <= given <= LONGEST_HOLD:
        raise ValueError(
            f"their 'hold' is {_shown(given)}, and neither true nor false nor seconds up to {LONGEST_HOLD:g}"
        )
    return float(given)


def _tokens(params: Mapping[str, Any]) -> int:
    given = params.get("tokens")
    if not isinstance(given, int) or isinstance(given, bool) or not 0 < given < MOST_TOKENS:
        raise ValueError(f"their 'tokens' is {_shown(given)}, and no whole number above 0 and below 2^32")
    return given


def _flag(params: Mapping[str, Any], key: str) -> bool:
    given = params.get(key)
    if given is not None and not isinstance(given, bool):
        raise ValueError(f"their {key!r} is {_shown(given)}, and neither true nor false")
    return bool(given)


def _transfer(params: Mapping[str, Any]) -> str:
    """The router's id of the request; empty if there is none."""
    given = params.get("transfer_id")
    if given is None:
        return ""
    if isinstance(given, int) and not isinstance(given, bool) and -(1 << 63) <= given < 1 << 64:
        return str(given)
    if not isinstance(given, str) or not 0 < len(given) <= LONGEST_ID:
        raise ValueError(
            f"their 'transfer_id' is {_shown(given)}, and no text of 1 to {LONGEST_ID} characters, and no whole number"
        )
    return given


def _shared(transfer: str, place: Place) -> int:
    """The id of a request that both servers work out from the router's id: each prompt of a list has its own."""
    salt = place.prompt.to_bytes(8, "big") if place.prompt else b""
    return _number(hashlib.blake2b(transfer.encode(errors="surrogatepass"), digest_size=8, salt=salt))


def _number(digest: hashlib.blake2b) -> int:
    """63 bits of a digest, and not zero."""
    return (int.from_bytes(digest.digest(), "big") >> 1) or 1


def _room(params: Mapping[str, Any], place: Place) -> int:
    given = params.get("room")
    if given is None:
        transfer = _transfer(params)
        if not transfer:
            raise ValueError("they have neither a 'room' nor a 'transfer_id'")
        return _shared(transfer, place)
    return _number_of_room(given)


def _number_of_room(given: Any, key: str = "room") -> int:
    number = given
    if isinstance(given, str) and DIGITS.fullmatch(given):
        number = int(given)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 < number < 1 << 64:
        raise ValueError(f"their {key!r} is {_shown(given)}, and no whole number above 0 and below 2^64")
    return number


def _content(params: Mapping[str, Any]) -> bytes:
    given = params.get("content")
    if given is None:
        return b""
    if not isinstance(given, str) or not CONTENT.fullmatch(given):
        raise ValueError(f"their 'content' is {_shown(given)}, and no hexadecimal text of at most 64 bytes")
    return bytes.fromhex(given)


def _peer(params: Mapping[str, Any], options: Options) -> str | tuple[str, ...]:
    if options.addressed_by_name:
        name = params.get("remote_engine_id")
        if name is None:
            raise ValueError("they have no 'remote_engine_id', by which the configuration finds prefill")
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
            raise ValueError(
                f"their 'remote_engine_id' is {_shown(name)}, and no name of 1 to {LONGEST_NAME} characters"
            )
        if name.startswith("tcp://"):
            raise ValueError("their 'remote_engine_id' is an address, and the configuration finds prefill by name")
        return name
    given = params.get("peer")
    if given is None:
        raise ValueError("they have no 'peer', a list of addresses, and no prefill server is configured by name")
    if not isinstance(given, (list, tuple)) or not given:
        raise ValueError(f"their 'peer' is {_shown(given)}, and no list of addresses")
    if len(given) > MOST_ADDRESSES:
        raise ValueError(f"their 'peer' has {len(given)} addresses, and at most {MOST_ADDRESSES} are admitted")
    for each in given:
        _check_address(each, any_host=options.link.insecure or options.link.keys is not None)
    addresses = tuple(given)
    if len(set(addresses)) < len(addresses):
        raise ValueError("their 'peer' has an address twice")
    return addresses


def _check_address(given: Any, *, any_host: bool) -> None:
    read = ADDRESS.fullmatch(given) if isinstance(given, str) else None
    if read is None or not 0 < int(read["port"]) < 1 << 16:
        raise ValueError(f"their 'peer' has {_shown(given)}, and no address (tcp://host:port, tcp://host:port@key)")
    if not any_host and not _on_loopback(read["host"].strip("[]")):
        raise ValueError(f"their 'peer' has {_shown(given)}, and without keys only loopback addresses are admitted")


def _on_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _shown(given: Any) -> str:
    """A value for a log: on one line, and short, however long it is."""
    if given is None or isinstance(given, (bool, float)):
        return json.dumps(given)
    if isinstance(given, int):
        return str(given) if abs(given) < 1 << 64 else "a number beyond 64 bits"
    if isinstance(given, str):
        return repr(given) if len(given) <= 80 else f"{given[:80]!r}… of {len(given)} characters"
    return "a list" if isinstance(given, (list, tuple)) else "an object"
