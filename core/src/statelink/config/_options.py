"""The options of a link."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec

from statelink._arguments import shown, text
from statelink.backend import UNKNOWN
from statelink.errors import ConfigError
from statelink.hints import did_you_mean
from statelink.wire import Keys

__all__ = ["LinkConfig", "Staging", "check_known", "read_options"]

KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}
"""The decoder's words for kinds of values, and those of an error."""
SHOWN = frozenset({"int", "float", "bool"})
"""Where only these are expected, an error shows the value."""


class Staging(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of staging: small blocks are gathered, moved as large blocks, and scattered; see docs/positions.md.

    Attributes:
        ring_bytes: Size of a ring on this side. There is one for each kind of memory; it is allocated at `open`.
        parcel_bytes: Most bytes that move at once.
        mode: ``auto`` stages a component if a block costs the backend more than copying it twice. Others are ``always``
            and ``never``. Decode decides.
        components: Component to its own mode.
    """

    ring_bytes: int = 64 << 20
    parcel_bytes: int = 4 << 20
    mode: Literal["auto", "always", "never"] = "auto"
    components: dict[str, Literal["auto", "always", "never"]] = {}

    def __post_init__(self) -> None:
        _settle(self, "options of staging")
        for name in ("ring_bytes", "parcel_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of staging must be above zero", cause=f"got {shown(getattr(self, name))}")


class LinkConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of one link.

    Attributes:
        role: ``prefill`` sends, ``decode`` receives, and ``both`` does both, over one registration of memory.
        backend: Name of an installed backend, or ``auto``. ``auto`` takes the backend of highest priority that can run
            here, register this memory, move this state, and use a transport in ``require``.
        options: Options of that backend. With ``auto``: backend name to a table of its options.
        require: Transports, such as ``rdma``. A peer is refused if another transport carries its bytes, or if nobody
            knows which. Empty, the default, allows any.
        listen: Where the control channel listens: an IP address, a host name or a network interface of this host, and a
            port; port 0 picks a free one. Of a range of ports, such as ``tcp://10.0.0.8:7100-7199``, the link takes the
            first free one: so the ranks of a host can share a configuration.
        advertise: Host name or IP address under which peers reach this process; the listening host if empty. This host
            must be able to resolve a name: backends tell peers the IP address.
        peers: Static rendezvous: instance name to the addresses of all of its ranks.
        siblings: Addresses of the other ranks of this link's own instance. Decode needs them to route, and prefill for
            `Sending.poll_all`. A rendezvous server can find them instead.
        rendezvous: Address of a directory, whose scheme says which it is: ``tcp://host:port`` for a rendezvous server,
            with its public key if it has one, or what a package brings. The link registers there, and finds instances
            that ``peers`` does not name.
        rendezvous_options: Options of that directory. A rendezvous server has none.
        keys: CURVE keys; needed to listen beyond loopback unless ``insecure``. The default takes them from the
            environment: see `Keys.from_environment`.
        insecure: Listen beyond loopback without keys.
        deadline: Seconds that a room may take on one side. A room can have a deadline of its own.
        heartbeat: Seconds between signs of life.
        liveness: Seconds of silence after which a peer counts as lost. After half of that it gets no new rooms. A room
            waits as long for a prefill that does not answer.
        take_back_after: Seconds after which decode gives back the memory of a failed room without proof that it has
            quiesced. ``None``, the default, waits for proof, because silence never proves death.
        verify: ``digest`` compares a digest of every component, as sent and as arrived, before a room succeeds. It
            needs host memory or memory of CUDA, ``statelink[verify]``, and the same setting on both sides. ``off``, the
            default, costs nothing.
        staging: Options of staging. ``None``, the default, moves everything directly. Both sides stage the same
            components; sizes may differ.
        telemetry: What is told to other libraries, by name, each with a table of its options: ``prometheus``,
            ``opentelemetry``, ``log``, or what a package brings. Empty, the default, costs nothing.
        inspect: Whether ``statelink inspect`` of the same user can look at the link, over a Unix socket.
        threads: Most moves that run at once. A move that waits for a stalled peer does not count.
        slice_bytes: Most bytes that a blocking backend gets at once.
        switch_interval: Seconds after which a thread of the link that has waited gets the interpreter back from a
            thread that runs Python: ``sys.setswitchinterval`` of the whole process while the link is open, from 0.0001
            to 0.005. Never lengthens it, and leaves what somebody else has set. ``None``, the default, leaves it alone;
            see docs/performance.md.
        max_rooms: Most rooms that may be open, or hold memory, at once. ``send`` and ``receive`` refuse more.
        max_pushes: Most pushes that may wait or run at once. A push counts once for each destination that is known.
            ``push`` refuses more.
        max_pending_request_bytes: Most bytes of pending requests, for which prefill's engine has opened no room. If
            there are more, the oldest request of the peer with the most bytes is refused.
    """

    role: Literal["prefill", "decode", "both"]
    backend: str
    options: dict[str, Any] = {}
    require: str | tuple[str, ...] = ()
    listen: str = "tcp://127.0.0.1:0"
    advertise: str = ""
    peers: dict[str, tuple[str, ...]] = {}
    siblings: tuple[str, ...] = ()
    rendezvous: str = ""
    rendezvous_options: dict[str, Any] = {}
    keys: Keys | None = None
    insecure: bool = False
    deadline: float = 120.0
    heartbeat: float = 1.0
    liveness: float = 10.0
    take_back_after: float | None = None
    verify: Literal["off", "digest"] = "off"
    staging: Staging | None = None
    telemetry: dict[str, dict[str, Any]] = {}
    inspect: bool = True
    threads: int = 2
    slice_bytes: int = 64 << 20
    switch_interval: float | None = None
    max_rooms: int = 65536
    max_pushes: int = 1 << 18
    max_pending_request_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        _settle(self, "configuration of a link")
        require = (self.require,) if isinstance(self.require, str) else self.require
        msgspec.structs.force_setattr(self, "require", tuple(dict.fromkeys(word for word in require if word)))
        if any("+" in word or word == UNKNOWN for word in self.require):
            raise ConfigError("require names transports", cause=f"got {', '.join(self.require)}")
        numbers = ("threads", "slice_bytes", "max_rooms", "max_pushes", "max_pending_request_bytes")
        for name in ("deadline", "heartbeat", "liveness", *numbers):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above zero", cause=f"got {shown(getattr(self, name))}")
        if self.take_back_after is not None and not self.take_back_after > 0:
            raise ConfigError("take_back_after must be above zero", cause=f"got {shown(self.take_back_after)}")
        if self.switch_interval is not None and not 0.0001 <= self.switch_interval <= 0.005:
            cause = f"got {shown(self.switch_interval)}"
            raise ConfigError("switch_interval must be 0.0001 to 0.005 seconds", cause=cause)
        if self.liveness < 2 * self.heartbeat:
            raise ConfigError(
                "liveness must be at least twice the heartbeat",
                cause=f"liveness is {self.liveness} s, heartbeat {self.heartbeat} s",
            )

    @classmethod
    def read(cls, given: LinkConfig | Mapping[str, Any]) -> LinkConfig:
        """Read a configuration from a mapping. A `LinkConfig` is returned as it is.

        Raises:
            ConfigError: A key is unknown or missing, or a value is of the wrong type.
        """
        return given if isinstance(given, cls) else read_options(cls, given, "configuration of a link")


def read_options(type_: Any, given: Any, what: str, **who: Any) -> Any:
    """Convert a mapping to a struct or dataclass, without coercing types.

    Raises:
        ConfigError: A key is unknown (the error names the nearest known one) or missing, or a value is of the wrong
            type.
    """
    if isinstance(given, type_):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what} is not a mapping", cause=f"got {type(given).__name__}", code="config.type", **who)
    check_known(type_, given, what, who)
    return _converted(type_, given, what, _instead(type_, given), who)


def _converted(type_: Any, given: Mapping[str, Any], what: str, hint: str, who: Mapping[str, Any]) -> Any:
    try:
        return msgspec.convert(_plain(given, what), type_, strict=True)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            reason = error.__cause__.reason
            named = {**reason.who, **{key: str(value) for key, value in who.items()}}
            raise ConfigError.of(msgspec.structs.replace(reason, who=named)) from None
        cause = _plainly(str(error), given)
        raise ConfigError(f"bad value in the {what}", cause=cause, hint=hint, code="config.type", **who) from error


def _settle(struct: msgspec.Struct, what: str) -> None:
    """Check the types of the fields of a frozen struct, because its constructor does not.

    Raises:
        ConfigError: A value is of the wrong type.
    """
    given = {field.name: getattr(struct, field.name) for field in msgspec.structs.fields(type(struct))}
    found = _converted(_fields_of(type(struct)), given, what, _instead(type(struct), given), {})
    for name in given:
        msgspec.structs.force_setattr(struct, name, getattr(found, name))


@functools.cache
def _fields_of(type_: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A struct of the same fields, without defaults and without checks of its own."""
    return msgspec.defstruct("Fields", [(field.name, field.type) for field in msgspec.structs.fields(type_)])


def _plain(given: Any, what: str) -> Any:
    """The same, with numbers and arrays of numpy as Python's. The decoder takes no others.

    Raises:
        ConfigError: A text has a character that cannot be sent.
    """
    if isinstance(given, Mapping):
        return {_plain(key, f"a key in the {what}"): _plain(value, shown(key)) for key, value in given.items()}
    if isinstance(given, (list, tuple, set, frozenset)):
        return [_plain(each, f"an entry of {what}") for each in given]
    if isinstance(given, str):
        return text(given, what, error=ConfigError)
    return given.tolist() if hasattr(given, "dtype") and hasattr(given, "tolist") else given


def _plainly(text: str, given: Mapping[str, Any]) -> str:
    """What the decoder says of a value, in the words of a configuration.

    The value is shown only where a number or a switch is expected: another one may be a key.
    """
    said, _, path = text.partition(" - at `$")
    place = path.removesuffix("`").removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field `(.+)`", said):
        return f"{place}.{missing[1]} is missing".removeprefix(".")
    if expected := re.fullmatch(r"Expected `([a-z |]+)`(.*?)(?:, got `(.+)`)?", said):
        kinds = expected[1].removesuffix(" | null").split(" | ")
        said = f"{' or '.join(KINDS.get(kind, kind) for kind in kinds)}{expected[2]} is expected"
        got = KINDS.get(expected[3], expected[3])
        if SHOWN.issuperset(kinds) and (found := _at(place, given)) is not None:
            got = shown(found)
        said += f", got {got}" if got else ""
    said = f"{said:.500}"
    return f"{place}: {said}" if place else said


def _at(place: str, given: Any) -> Any:
    """The value at a place such as ``staging.ring_bytes``; ``None`` if the place does not lead to one."""
    for key in place.split("."):
        given = given.get(key) if isinstance(given, Mapping) else None
    return given


def check_known(type_: Any, given: Mapping[str, Any], what: str, who: Mapping[str, Any]) -> None:
    """Refuse a key that the type does not have, also in the tables inside."""
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(type_)}
    for key, value in given.items():
        if key not in fields:
            raise ConfigError(
                f"unknown key {shown(key)} in the {what}",
                cause=f"known keys: {', '.join(sorted(fields)) or 'none'}",
                hint=did_you_mean(key, fields) if isinstance(key, str) else "",
                code="config.key",
                **who,
            )
        for inner in (fields[key], *get_args(fields[key])):
            if isinstance(value, Mapping) and isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                check_known(inner, value, f"table {key!r} of the {what}", who)


def _instead(type_: Any, given: Mapping[str, Any]) -> str:
    """A hint for the first key that is missing, or whose value is none of its allowed words."""
    for field in msgspec.structs.fields(type_):
        value, words = given.get(field.encode_name), get_args(field.type)
        wrong = field.required if field.encode_name not in given else isinstance(value, str) and value not in words
        if get_origin(field.type) is Literal and wrong:
            return f"{field.encode_name!r} is one of {', '.join(map(repr, words))}"
    return ""
