"""What the operator configured: vLLM's ``kv_connector_extra_config``, read in the engine core and in each worker."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import statelink
from statelink.errors import ConfigError

__all__ = ["ALLOWED", "LONGEST_HOLD", "WHERE", "Options", "read_options"]

WHERE = "kv_connector_extra_config"

OWN_TABLE = "vllm"
"""The key of the adapter's own options; every other key is one of the link's."""

EVERY = "bidirectional_kv_xfer"
"""The key with which vLLM's own connector for NIXL holds the state of each conversation."""

SET_HERE = ("role", "siblings")
"""Keys of a link that follow from vLLM's own options."""

ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}

ALLOWED = {"cuda": "a cache in device memory", "version": "another release of vLLM"}
"""What no test with an engine covers. It is refused unless the operator allows it."""

FILLS = {
    "pairs": "the key and then the value of each token",
    "halves": "the keys of all tokens of a head, and then their values",
}
"""How a backend of attention may fill the pages of a head. Any other way is known only to the backend itself."""


HOLD_SECONDS = 120.0
"""The default of the option ``hold``."""
SHORTEST_KEY = 16
LONGEST_HOLD = 86400.0
"""Most seconds for which the state of a conversation may be held."""


class Options(NamedTuple):
    """What the operator configured.

    Attributes:
        link: The link's configuration.
        allow: Words of `ALLOWED`.
        model: The model's identity, which both sides must state alike; by default taken from the model's shape.
        pages: By vLLM's name of a backend of attention, a word of `FILLS`.
        hold: Seconds for which the state of a conversation is held for its next turn, if a router does not say.
        move_key: What a caller has to know who moves requests to another server; empty if nobody may.
        every: Whether the state of each conversation is held, without a router's wish.
    """

    link: statelink.LinkConfig
    allow: frozenset[str]
    model: str
    pages: Mapping[str, str]
    hold: float = HOLD_SECONDS
    move_key: str = ""
    every: bool = False

    @property
    def addressed_by_name(self) -> bool:
        """Whether decode finds prefill by the name of its instance, and not by addresses in a request."""
        return bool(self.link.peers or self.link.rendezvous)


def read_options(kv_role: str | None, given: Mapping[str, Any] | None) -> Options:
    """Read vLLM's ``kv_role`` and ``kv_connector_extra_config``. Without a backend, Statelink chooses one.

    Raises:
        ConfigError: A key or value is wrong.
    """
    if kv_role not in ROLES:
        raise ConfigError(
            f"kv_role is {kv_role!r}", cause=f"one of {', '.join(ROLES)} is expected", code="config.engine"
        )
    keys = dict(given or {})
    own = keys.pop(OWN_TABLE, {})
    for key in SET_HERE:
        if key in keys:
            raise ConfigError(
                f"{WHERE} has the key {key!r}",
                cause="it follows from the options of the vLLM server",
                hint="leave it out",
                code="config.key",
            )
    every = keys.pop(EVERY, False)
    if not isinstance(every, bool) or (every and kv_role != "kv_both"):
        raise ConfigError(
            f"{WHERE} has {EVERY!r}: {every!r:.80}",
            cause="true or false is expected, and true only with the kv_role 'kv_both'",
            hint="a server that holds the state of conversations receives and sends",
            code="config.type",
        )
    link = statelink.LinkConfig.read({"backend": "auto", **keys, "role": ROLES[kv_role]})
    return Options(link, *_own(own), every)


def _own(own: Any) -> tuple[frozenset[str], str, Mapping[str, str], float, str]:
    if not isinstance(own, Mapping) or not set(own) <= {"allow", "model", "pages", "hold", "move_key_file"}:
        raise ConfigError(
            f"the table {OWN_TABLE!r} of {WHERE} has wrong keys",
            cause=f"got {own!r:.80}",
            hint="it may have 'allow', a list of words, 'model', a text, 'pages', a table, 'hold', a number, and "
            "'move_key_file', a path",
            code="config.key",
        )
    allow, model, pages = own.get("allow", []), own.get("model", ""), own.get("pages", {})
    hold = own.get("hold", HOLD_SECONDS)
    words = isinstance(allow, list) and set(map(str, allow)) <= set(ALLOWED)
    filled = isinstance(pages, Mapping) and set(map(str, pages.values())) <= set(FILLS)
    seconds = isinstance(hold, (int, float)) and not isinstance(hold, bool) and 0 < hold <= LONGEST_HOLD
    if not words or not filled or not isinstance(model, str) or not seconds:
        raise ConfigError(
            f"the table {OWN_TABLE!r} of {WHERE} has a wrong value",
            cause=f"got {own!r:.80}",
            hint=f"'allow' is a list of {', '.join(ALLOWED)}; 'model' is a text; 'pages' says of each backend of "
            f"attention one of {', '.join(FILLS)}; 'hold' is a number of seconds up to {LONGEST_HOLD:g}",
            code="config.type",
        )
    return frozenset(allow), model, dict(pages), float(hold), _key(own.get("move_key_file"))


def _key(file: Any) -> str:
    if file is None:
        return ""
    try:
        key = Path(file).read_text("ascii").strip()
    except (OSError, TypeError, ValueError) as error:
        key, cause = "", f"{file!r:.80} cannot be read: {error}"
    else:
        cause = f"it has {len(key)} characters, and at least {SHORTEST_KEY} are needed"
    if len(key) < SHORTEST_KEY:
        raise ConfigError(
            f"'move_key_file' in the table {OWN_TABLE!r} of {WHERE} names no key",
            cause=cause,
            hint="make one, for example with `openssl rand -hex 32`, and let nobody else read it",
            code="config.type",
        )
    return key
