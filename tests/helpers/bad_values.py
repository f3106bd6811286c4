"""Values that a caller may pass by mistake, for every argument of every public function."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np

from statelink.errors import StatelinkError

__all__ = ["BAD", "MANY", "escaped"]


class _Unshowable:
    """Something whose text nobody gets."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


MANY = 1 << 31
"""A number that is right for some, and much for all."""
BAD: tuple[Any, ...] = (
    None,
    True,
    np.True_,
    -1,
    0,
    MANY,
    1 << 63,
    1 << 64,
    2**4000,
    10**5000,
    1.5,
    math.nan,
    math.inf,
    -math.inf,
    np.float32("nan"),
    1j,
    Decimal(3),
    "",
    "x",
    "\ud800",
    "x" * 100_000,
    b"x",
    [],
    [True, 0],
    ("x", None),
    (10**5000, 1),
    {"x": 1},
    {10**5000: 1},
    {"\ud800"},
    np.array([1, 2]),
    np.ma.masked_array([1, 2], [False, True]),
    object(),
    _Unshowable(),
    len,
)
"""None of them is right everywhere, and some are right somewhere."""


def escaped(call: Callable[[Any], object], values: tuple[Any, ...] = BAD) -> list[str]:
    """What a call with each value raises that is none of Statelink's own errors, in words."""
    found = []
    for value in values:
        try:
            call(value)
        except StatelinkError as error:
            try:
                said = str(error)
                said.encode()
                assert len(said) < 2000, "it is long"
            except Exception as wrong:
                found.append(f"{type(value).__name__}: the error has no text that can be sent: {wrong!r:.100}")
        except Exception as error:
            found.append(f"{type(value).__name__}: {error!r:.120}")
    return found
