"""Runs checks in a process of their own, and reports the end of that process as a problem."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from statelink.backend import Check, Verdict

from ._alone import Alone, Ended
from ._loopback import Transfer

__all__ = ["checked_alone"]


class _Result(msgspec.Struct):
    check: Check | None = None
    transfer: Transfer | None = None


def checked_alone(
    work: Callable[[], Iterable[Check | Transfer]], doing: str, *names: str
) -> Iterator[Check | Transfer]:
    """What some work yields. It runs in a process of its own, which is ended if the caller stops early.

    Args:
        work: See `Alone`.
        doing: What the process does, such as ``importing it``.
        names: What the first checks are called, in order. One that the process does not survive has this name, or the
            last one.
    """

    def plain() -> Iterator[object]:
        for each in work():
            yield msgspec.to_builtins(_Result(transfer=each) if isinstance(each, Transfer) else _Result(check=each))

    left = list(names)
    with Alone(plain) as child:
        try:
            for value in child.values():
                result = msgspec.convert(value, _Result)
                found = result.check or result.transfer
                assert found is not None
                yield found
                left = left[1:] or left
        except Ended as ended:
            yield Check(what=left[0], verdict=Verdict.PROBLEM, found=f"{doing} {ended.found}", hint=ended.hint)
