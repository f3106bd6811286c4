"""Options of a backend on the command line."""

from __future__ import annotations

import json
from typing import Any

import click

__all__ = ["pair"]


def pair(text: str) -> tuple[str, Any]:
    """Read ``KEY=VALUE``. The value is JSON, or else text."""
    key, found, value = text.partition("=")
    if not found:
        raise click.BadParameter(f"{text!r} is not KEY=VALUE", param_hint="--option")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
