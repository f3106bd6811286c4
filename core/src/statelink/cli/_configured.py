"""Reads the configuration in a command's environment: the part of it that is right, and all errors in the rest."""

from __future__ import annotations

import os
from typing import Any, Final, NamedTuple

from statelink.config import Given, read_config
from statelink.errors import StatelinkError

__all__ = ["BY_ENGINE", "Configured", "configured", "key_fields"]

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


def key_fields(secret_file: str, allow_file: str) -> dict[str, Any] | None:
    """Fields of `Keys` from a command's options. For the secret, or for the allow-list, the environment stands in.

    Returns:
        The fields. ``None`` if neither option is given: then everything comes from elsewhere.
    """
    if not secret_file and not allow_file:
        return None
    read = os.environ.get
    secret = {"secret": read("STATELINK_SECRET", ""), "secret_file": read("STATELINK_SECRET_FILE", "")}
    words = tuple(read("STATELINK_ALLOW", "").replace(",", " ").split())
    allow = {"allow": words, "allow_file": read("STATELINK_ALLOW_FILE", "")}
    return {
        **({"secret_file": secret_file} if secret_file else secret),
        **({"allow_file": allow_file} if allow_file else allow),
    }
