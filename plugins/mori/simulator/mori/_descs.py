"""Descriptors, which travel only as what ``pack`` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from ._configs import MemoryLocationType

_Kind = TypeVar("_Kind", bound="_Desc")


def _field(name: str) -> property:
    """Attributes of the class, too, as those of the library's bindings are."""

    def value(desc: _Desc) -> Any:
        return desc.__dict__["_values"][name]

    return property(value)


class _Desc:
    _fields: ClassVar[dict[str, type]]
    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__}: No constructor defined!")

    def __init_subclass__(cls) -> None:
        for name in cls._fields:
            setattr(cls, name, _field(name))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"property {name!r} of {type(self).__name__!r} object has no setter")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__["_values"] == other.__dict__["_values"]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"cannot pickle {type(self).__name__!r} object")

    def pack(self) -> bytes:
        values = self.__dict__["_values"].values()
        return msgspec.msgpack.encode([int(each) if isinstance(each, MemoryLocationType) else each for each in values])

    @classmethod
    def unpack(cls: type[_Kind], data: bytes) -> _Kind:
        """From bytes.

        Raises:
            RuntimeError: They are something else.
        """
        if not isinstance(data, bytes):
            raise TypeError("unpack(): incompatible function arguments. The following argument types are supported:")
        if not data:
            raise RuntimeError("insufficient bytes")
        try:
            found = msgspec.msgpack.decode(data, type=list[Any])
        except msgspec.MsgspecError as error:
            raise RuntimeError("std::bad_cast") from error
        kinds = cls._fields.values()
        bare = [int if kind is MemoryLocationType else kind for kind in kinds]
        if len(found) != len(bare) or not all(type(v) is kind for v, kind in zip(found, bare, strict=True)):
            raise RuntimeError("std::bad_cast")
        try:
            return made(cls, *(kind(each) for each, kind in zip(found, kinds, strict=True)))
        except ValueError as error:
            raise RuntimeError("std::bad_cast") from error


class EngineDesc(_Desc):
    _fields: ClassVar = {"key": str, "node_id": str, "hostname": str, "host": str, "port": int, "pid": int}


class MemoryDesc(_Desc):
    _fields: ClassVar = {
        "engine_key": str,
        "id": int,
        "device_id": int,
        "device_bus_id": str,
        "numa_node": int,
        "data": int,
        "size": int,
        "loc": MemoryLocationType,
        "ipc_handle": bytes,
    }


def made(kind: type[_Kind], *values: Any) -> _Kind:
    """The library's own way to make one."""
    desc = object.__new__(kind)
    desc.__dict__["_values"] = dict(zip(kind._fields, values, strict=True))
    return desc
