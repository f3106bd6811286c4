"""What options of commands may be: KEY=VALUE, and a number with a fraction."""

from __future__ import annotations

import json
import math
from typing import Any

import click

__all__ = ["Number", "pair", "seconds"]


def pair(text: str) -> tuple[str, Any]:
    """Read ``KEY=VALUE``. The value is JSON, or else text."""
    key, found, value = text.partition("=")
    if not found:
        raise click.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="--option")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


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
