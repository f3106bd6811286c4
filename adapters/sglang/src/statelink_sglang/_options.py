"""How an operator names the Statelink backend and its options: one environment variable, read in each scheduler."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import statelink
from statelink.errors import ConfigError

__all__ = ["ALLOWED", "VARIABLE", "Options", "allows", "read_options"]

VARIABLE = "STATELINK_SGLANG_CONFIG"

OWN_TABLE = "sglang"
"""The key of the adapter's own options; every other key is one of the link's."""

SET_HERE = ("role", "peers", "siblings", "rendezvous", "rendezvous_options")
"""Keys of a link that follow from SGLang's own options, or have no meaning beside them."""

ALLOWED = {
    "cuda": "pools in device memory",
    "nodes": "a server on several machines (--nnodes)",
    "version": "another release of SGLang",
}
"""What no test of the adapter shows. It is refused unless the operator allows it."""


class Options(NamedTuple):
    """What the operator configured.

    Attributes:
        link: The link's configuration, without what differs between ranks.
        allow: Words of `ALLOWED`.
        model: The model's identity, which both sides must state alike; by default taken from the model's shape.
        rows_optional: Whether the other server may have no metadata rows, as an engine of another kind.
    """

    link: statelink.LinkConfig
    allow: frozenset[str]
    model: str
    rows_optional: bool

    @property
    def keys(self) -> statelink.Keys | None:
        """The link's keys, as `statelink.open` finds them: in its configuration, or else in the environment.

        Raises:
            ConfigError: They cannot be used.
        """
        return self.link.keys or statelink.Keys.from_environment()


def read_options(role: str, environment: Mapping[str, str] | None = None) -> Options:
    """The options in the environment: JSON, or the path of a file with JSON. ``auto`` if there are none.

    Raises:
        ConfigError: It cannot be read, or a key or value is wrong.
    """
    given = _given((os.environ if environment is None else environment).get(VARIABLE, "").strip())
    own = given.pop(OWN_TABLE, {})
    for key in SET_HERE:
        if key in given:
            raise ConfigError(
                f"{VARIABLE} has the key {key!r}",
                cause="it follows from the options of the SGLang server",
                hint="leave it out",
                code="config.key",
            )
    return Options(statelink.LinkConfig.read({"backend": "auto", **given, "role": role}), *_own(own))


def allows(word: str) -> bool:
    """Whether the options in the environment have a word of `ALLOWED`. False if they are unreadable."""
    try:
        return word in read_options("prefill").allow
    except ConfigError:
        return False


def _given(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        if text.startswith("{"):
            found = json.loads(text)
        else:
            with open(text, "rb") as file:
                found = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{VARIABLE} cannot be read",
            cause=f"{type(error).__name__}: {error}",
            hint="""give JSON such as '{"backend": "nixl"}', or the path of a file with JSON""",
            code="config.file",
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{VARIABLE} is no table of keys", cause=f"got {type(found).__name__}", code="config.type")
    return found


def _own(own: Any) -> tuple[frozenset[str], str, bool]:
    if not isinstance(own, dict) or not set(own) <= {"allow", "model", "rows"}:
        raise ConfigError(
            f"the table {OWN_TABLE!r} of {VARIABLE} has wrong keys",
            cause=f"got {own!r:.80}",
            hint="it may have 'allow', a list of words, 'model', a text, and 'rows', a word",
            code="config.key",
        )
    allow, model, rows = own.get("allow", []), own.get("model", ""), own.get("rows", "required")
    words = isinstance(allow, list) and set(map(str, allow)) <= set(ALLOWED)
    if not words or not isinstance(model, str) or rows not in ("required", "optional"):
        raise ConfigError(
            f"the table {OWN_TABLE!r} of {VARIABLE} has a wrong value",
            cause=f"got {own!r:.80}",
            hint=f"'allow' is a list of {', '.join(ALLOWED)}; 'model' is a text; 'rows' is 'required' or 'optional'",
            code="config.type",
        )
    return frozenset(allow), model, rows == "optional"
