"""Reads the configuration in a command's environment: the part of it that is right, and all errors in the rest."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from statelink.config import Given, read_config
from statelink.errors import StatelinkError

__all__ = ["BY_ENGINE", "Configured", "configured"]

BY_ENGINE: Final = {"role": "decode", "backend": "auto"}
"""Values for keys that have no default, and that an engine may set itself. Used if the environment has no value."""


class Configured(NamedTuple):
    """What was found.

    Attributes:
        given: The configuration without the variables that are wrong. ``None`` if there is none, or if its file is
            wrong. `BY_ENGINE` has the values of keys without an origin.
        errors: What is wrong, one error for each variable or for the file.
    """

    given: Given | None
    errors: tuple[StatelinkError, ...]

    def place(self, key: str) -> str:
        """The variable or the file that has a key; empty if none has it."""
        return ", ".join(self.given.origin(key).values()) if self.given else ""


def configured() -> Configured:
    """Read the environment, and the file that it names. Returns the errors in them, and does not raise them."""
    variables, errors = dict(os.environ), list[StatelinkError]()
    while True:
        try:
            return Configured(read_config(None, variables, assumed=BY_ENGINE), tuple(errors))
        except StatelinkError as error:
            if error.code == "config.file" and not variables.get("STATELINK_CONFIG"):  # no key is given
                return Configured(None, tuple(errors))
            errors.append(error)
            # Without this variable, the next reading finds what else is wrong.
            if variables.pop(error.reason.who.get("variable", ""), None) is None:
                return Configured(None, tuple(errors))
