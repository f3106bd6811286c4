"""What the library's bindings do with arguments, its enumerations, and its functions."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeAlias, TypeVar

from ._errors import failed
from ._logs import set_function, set_level

__all__ = [
    "I32",
    "U8",
    "U32",
    "U64",
    "Addresses",
    "Text",
    "TransDataOpType",
    "TransferOpcode",
    "create_config_store",
    "native",
    "set_conf_store_tls",
    "set_extern_logger",
    "set_log_level",
    "text_of",
]

Function = TypeVar("Function", bound=Callable[..., Any])

I32: TypeAlias = int
U8: TypeAlias = int
U32: TypeAlias = int
U64: TypeAlias = int
Text: TypeAlias = Any
"""A string, or ``None``, which the bindings let through."""
Function_: TypeAlias = Any
"""Anything that can be called."""
Addresses: TypeAlias = Any
"""Anything that can be iterated over and is no text and no mapping."""


def _integer(value: Any, low: int, high: int) -> int:
    """Whatever says that it is an integer, and no float."""
    if isinstance(value, (float, str, bytes)) or not (hasattr(value, "__index__") or hasattr(value, "__int__")):
        raise TypeError
    number = operator.index(value) if hasattr(value, "__index__") else int(value)
    if not low <= number < high:
        raise TypeError
    return number


class Enumeration:
    """An enumeration of the bindings: any integer makes a member, most of them without a name."""

    __members__: ClassVar[dict[str, Any]]

    def __init__(self, value: int) -> None:
        try:
            self._value = _integer(value, -(1 << 31), 1 << 31)
        except TypeError:
            raise TypeError(f"__init__(): incompatible constructor arguments\n\nInvoked with: {value!r}") from None

    @classmethod
    def of(cls, **members: int) -> None:
        """Give it its members."""
        cls.__members__ = {name: cls(value) for name, value in members.items()}
        for name, member in cls.__members__.items():
            setattr(cls, name, member)

    @property
    def value(self) -> int:
        return self._value

    @property
    def name(self) -> str:
        return next((name for name, member in self.__members__.items() if member == self), "???")

    def __int__(self) -> int:
        return self._value

    def __index__(self) -> int:
        return self._value

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and int(other) == self._value

    def __hash__(self) -> int:
        return self._value

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self._value}>"

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class TransferOpcode(Enumeration):
    """Which way bytes go."""

    Read: ClassVar[TransferOpcode]
    Write: ClassVar[TransferOpcode]


class TransDataOpType(Enumeration):
    """What moves the bytes. The C enumeration has more than are named here: 4 is HOST_TCP."""

    SDMA: ClassVar[TransDataOpType]
    HOST_RDMA: ClassVar[TransDataOpType]
    DEVICE_RDMA: ClassVar[TransDataOpType]
    DEVICE_URMA: ClassVar[TransDataOpType]
    DEVICE_UBOE: ClassVar[TransDataOpType]


TransferOpcode.of(Read=0, Write=1)
TransDataOpType.of(SDMA=1, HOST_RDMA=2, DEVICE_RDMA=8, DEVICE_URMA=64, DEVICE_UBOE=128)


def _addresses(value: Any) -> list[int]:
    if isinstance(value, (str, bytes, dict)) or not isinstance(value, Iterable):
        raise TypeError
    return [_integer(item, 0, 1 << 64) for item in value]


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, (str, bytes)):
        raise TypeError
    return value.decode() if isinstance(value, bytes) else value


def _kind(value: Any) -> TransDataOpType:
    if not isinstance(value, TransDataOpType):
        raise TypeError
    return value


def _function(value: Any) -> Callable[[int, str], None]:
    if not callable(value):
        raise TypeError
    return value  # type: ignore[no-any-return]


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


_casts: dict[str, Callable[[Any], Any]] = {
    "I32": lambda value: _integer(value, -(1 << 31), 1 << 31),
    "U8": lambda value: _integer(value, 0, 1 << 8),
    "U32": lambda value: _integer(value, 0, 1 << 32),
    "U64": lambda value: _integer(value, 0, 1 << 64),
    "Text": _text,
    "Addresses": _addresses,
    "Function_": _function,
    "TransDataOpType": _kind,
    "bool": _flag,
}


def native(function: Function) -> Function:
    """Take arguments as the bindings do: by position or keyword, converted by type, or a TypeError."""
    signature = inspect.signature(function)
    casts = {name: _casts[each.annotation] for name, each in signature.parameters.items() if name != "self"}

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            bound = signature.bind(*arguments, **named)
            bound.apply_defaults()
            for name, cast in casts.items():
                bound.arguments[name] = cast(bound.arguments[name])
        except TypeError:
            given = ", ".join(map(repr, arguments))
            raise TypeError(
                f"{function.__name__}(): incompatible function arguments. The following argument types are supported:"
                f"\n    1. {function.__name__}{signature}\n\nInvoked with: {given}"
            ) from None
        return function(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]


def text_of(value: str | None) -> str:
    """A text that the library makes a string of, which ``None`` cannot become."""
    if value is None:
        raise RuntimeError("basic_string::_S_construct null not valid")
    return value


@native
def create_config_store(store_url: Text) -> int:
    """A central store; 1.3.0 needs none for transfers."""
    if store_url is None:
        return -2000
    host, _, port = store_url.removeprefix("tcp://").rpartition(":")
    if host and port.isdigit():
        return 0
    return failed(-2000, f"CreateParser failed, url: tcp://{store_url.removeprefix('tcp://')}")


@native
def set_log_level(level: I32) -> int:
    """From 0, everything, to 4, nothing but traces; says the text, and takes 5, too."""
    if not 0 <= level <= 5:
        return failed(-2000, "set log level failed, invalid param, level should be 0~4")
    set_level(level)
    return 0


@native
def set_extern_logger(log_fn: Function_) -> int:
    """Have a function take the lines, but for those of the bindings, instead of standard output."""
    set_function(log_fn)
    return 0


@native
def set_conf_store_tls(enable: bool, tls_info: Text) -> int:
    """Accepted, and without effect."""
    return 0
