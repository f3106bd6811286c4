"""The presets of this package: published models, tables of `presets.toml`, with the source of their numbers."""

from __future__ import annotations

import functools
import importlib.resources
import sys
from typing import Any

from statelink.errors import ConfigError
from statelink.hints import did_you_mean

from ._model import Model

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

__all__ = ["parse_toml", "preset", "presets"]

def presets() -> tuple[str, ...]:
    """Names of the presets, in order."""
    return tuple(sorted(_tables()))


def preset(name: str) -> Model:
    """The preset called ``name``.

    Raises:
        ConfigError: There is none.
    """
    known = presets()
    if name not in known:
        raise ConfigError(
            f"no preset named {name!r}",
            cause=f"known presets: {', '.join(known)}",
            hint=did_you_mean(name, known, "give the model's geometry in a section 'model'"),
        )
    return Model.read({"name": name, **_tables()[name]}, f"preset {name!r}")


@functools.cache
def _tables() -> dict[str, Any]:
    return parse_toml(importlib.resources.files(__package__).joinpath("presets.toml").read_text(encoding="utf-8"))


def parse_toml(text: str) -> dict[str, Any]:
    """Read TOML as a mapping.

    Raises:
        ConfigError: The text is no TOML.
    """
    try:
        return dict(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("not TOML", cause=str(error)) from error
