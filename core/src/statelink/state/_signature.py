"""Checks the arguments of a public function, and the fields of a public struct, by their annotations.

An annotation says what is checked: whole numbers, texts, switches, instances of a class, and tuples, lists and dicts
of these. Arrays are `Any`. The functions themselves look at them, and at numbers that may have a fraction.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from statelink._arguments import shown, switch, text, whole
from statelink.errors import StateError

from ._inventory import MAX_LAYER, Partition

__all__ = ["checked", "settle"]

P = ParamSpec("P")
R = TypeVar("R")

Check = Callable[[Any, str], Any]
"""Takes a value and what it is meant to be. Returns the value, with numbers of numpy as those of Python."""
PLAIN: dict[Any, Check | None] = {int: whole, str: text, bool: switch, float: None, Any: None}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function check its arguments first, by their annotations. An error names the argument and the function."""
    signature = inspect.signature(function)
    # The modules of these functions import Partition for a type checker only.
    hints = get_type_hints(function, localns={"Partition": Partition})
    checks = {name: check for name in signature.parameters if (check := _check(hints[name]))}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            if name in checks:
                bound.arguments[name] = checks[name](value, f"{name!r} of {function.__name__}")
        return function(*bound.args, **bound.kwargs)

    return call


def settle(struct: msgspec.Struct, what: str) -> None:
    """Check the fields of a frozen struct by their annotations, and make Python's numbers of numpy's.

    Raises:
        StateError: One is of another kind. The error names the field.
    """
    for name, check in _fields(type(struct)).items():
        given = getattr(struct, name)
        found = check(given, f"{name!r} of {what}")
        if found is not given:
            msgspec.structs.force_setattr(struct, name, found)


@functools.cache
def _fields(struct: type[msgspec.Struct]) -> dict[str, Check]:
    return {name: check for name, hint in get_type_hints(struct).items() if (check := _check(hint))}


def _check(hint: Any) -> Check | None:
    """The check for a type; ``None`` for one that is not checked here."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is None:
        return PLAIN[hint] if hint in PLAIN else functools.partial(_instance, hint)
    if kind in (Union, UnionType):
        inner = _check(parts[0]) if parts[1:] == (NoneType,) else None
        return inner and functools.partial(_optional, inner)
    if kind is Mapping:
        return functools.partial(_mapping, _layer if parts[0] is int else text, _check(parts[1]))
    if kind is tuple and parts[-1] is not Ellipsis:
        return None if Any in parts else functools.partial(_tuple, [_check(part) for part in parts])
    if kind in (Sequence, tuple):
        return functools.partial(_sequence, _check(parts[0]))
    return None


def _layer(value: Any, what: str) -> int:
    return whole(value, what, 0, MAX_LAYER)


def _instance(kind: type, value: Any, what: str) -> Any:
    if not isinstance(value, kind):
        raise StateError(f"{what} is {shown(value)}", cause=f"a {kind.__name__} is expected")
    return value


def _optional(inner: Check, value: Any, what: str) -> Any:
    return None if value is None else inner(value, what)


def _mapping(key: Check, item: Check | None, value: Any, what: str) -> Any:
    if not isinstance(value, Mapping):
        raise StateError(f"{what} is of type {type(value).__name__}", cause="a dict is expected")
    return {
        key(name, f"a key of {what}"): each if item is None else item(each, f"entry {shown(name)} of {what}")
        for name, each in value.items()
    }


def _tuple(items: Sequence[Check | None], value: Any, what: str) -> Any:
    if not isinstance(value, (tuple, list)) or len(value) != len(items):
        raise StateError(f"{what} is {shown(value)}", cause=f"a tuple of {len(items)} is expected")
    return tuple(each if item is None else item(each, what) for item, each in zip(items, value, strict=True))


def _sequence(item: Check | None, value: Any, what: str) -> Any:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise StateError(f"{what} is {shown(value)}", cause="a list or tuple is expected")
    return tuple(each if item is None else item(each, f"an entry of {what}") for each in value)
