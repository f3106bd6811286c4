"""What options of the command may be: the rate of a line, and a time."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import click

__all__ = ["ROUND_TRIP", "Rate", "RateType"]

NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z/]+)\s*", re.IGNORECASE)
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}


class Unit(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in some releases of click
    """A number with one of some units, such as ``30ms``.

    Args:
        name: What it is, for the help.
        units: Unit, in lower case, to what it is worth.
        most: Largest value.
    """

    def __init__(self, name: str, units: Mapping[str, float], most: float) -> None:
        self.name = name
        self._units = units
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value in the unit that is worth 1."""
        if not isinstance(value, str):
            return value
        found = NUMBER.fullmatch(value)
        unit = self._units.get(found[2].lower().removesuffix("/s")) if found else None
        number = float(found[1]) * unit if found and unit else math.nan
        if not 0 < number <= self._most:
            units = ", ".join(self._units)
            self.fail(f"{value!r} is no {self.name}: a number above 0 with one of the units {units}.", param, ctx)
        return number


class Rate(NamedTuple):
    """A rate, and how it was written."""

    bytes_per_second: float
    words: str


class RateType(Unit):
    """The rate of a line, such as ``10gbit``."""

    def __init__(self) -> None:
        super().__init__("rate", BITS, 1e15)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A `Rate`."""
        if not isinstance(value, str):
            return value
        bits: float = super().convert(value, param, ctx)
        unit, worth = [("kbit", 1e3), *(each for each in BITS.items() if each[1] <= bits)][-1]
        return Rate(bits / 8, f"{bits / worth:g} {unit[0].upper()}bit/s".replace("Kbit", "kbit"))


ROUND_TRIP = Unit("time", {"us": 1e-6, "ms": 1e-3, "s": 1.0}, 60.0)
"""A round trip, in seconds."""
