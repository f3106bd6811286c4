"""Reads the configuration in a command's environment: the part of it that is right, and all errors in the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from statelink.config import CONFIG_VARIABLE, PREFIX, Given, LinkConfig, read_config
from statelink.errors import BackendError, StatelinkError
from statelink.opening import CHECKS

__all__ = ["BY_ENGINE", "Configured", "configured", "key_fields"]

BY_ENGINE: Final = {"role": "decode", "backend": "auto"}
"""Values for keys that have no default, and that an engine may set itself. Used if the environment has no value."""


UNKNOWN: Final = {"heartbeat": 1e-9, "liveness": 1e9}
"""Values for keys of a file that cannot be read. With these, the keys of variables that are checked together with them
are right."""


class Configured(NamedTuple):
    """What was found.

    Attributes:
        given: The configuration without what is wrong. ``None`` if nothing is left. Keys without an origin have
            defaults, or the values of `BY_ENGINE`.
        errors: What is wrong, one error for each variable and for the file.
        lost: Keys whose values are not known, because a variable or the file is wrong.
    """

    given: Given | None
    errors: tuple[StatelinkError, ...]
    lost: frozenset[str] = frozenset()

    def place(self, key: str) -> str:
        """The variable or the file that has a key; empty if none has it."""
        return ", ".join(self.given.origin(key).values()) if self.given else ""

    def problems(self) -> Iterator[StatelinkError]:
        """Everything for which a link does not open with this configuration, whatever its inventory is.

        What depends on a lost key is not checked. Whether the backend is installed and loads is not checked, either.
        """
        yield from self.errors
        if self.given is None:
            return
        lost = set(self.lost)
        for check in CHECKS:
            if check.reads & lost:
                continue
            try:
                check(self.given)
            except BackendError:  # the checks of the backend say so
                pass
            except StatelinkError as error:
                lost.add(check.key)
                yield error


def configured() -> Configured:
    """Read the environment, and the file that it names. Returns the errors in them, and does not raise them."""
    variables, errors = dict(os.environ), list[StatelinkError]()
    assumed: dict[str, Any] = {**BY_ENGINE}
    lost, whole = set[str](), False
    while True:
        try:
            given = read_config(None, variables, assumed=assumed)
        except StatelinkError as error:
            if error.code == "config.file" and not variables.get(CONFIG_VARIABLE):  # no key is given
                return Configured(None, tuple(errors))
            errors.append(error)
            # Without this variable, or without the file, the next reading finds what else is wrong.
            name = error.reason.who.get("variable", CONFIG_VARIABLE)
            if variables.pop(name, None) is None:
                return Configured(None, tuple(errors))
            lost.add(name.removeprefix(PREFIX).lower())
            if name == CONFIG_VARIABLE:
                whole = True
                assumed.update(UNKNOWN)
            continue
        if whole:
            lost |= set(LinkConfig.__struct_fields__) - given.origins.keys()
        return Configured(given, tuple(errors), frozenset(lost))


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
