"""Options that are numbers with a fraction."""

from __future__ import annotations

import math
from typing import Any

import click

__all__ = ["Number", "seconds"]

DAY = 24 * 3600.0


class Number(click.FloatRange):
    """A number from a range. A range of click has NaN in it, because NaN is neither below nor above anything."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is no number.", param, ctx)
        return number


def seconds(least: float) -> Number:
    """So many seconds, from ``least`` to those of a day."""
    return Number(min=least, max=DAY)
