"""Reads a configuration from a mapping, a file or the environment. Errors say where a wrong key was found."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from statelink.errors import ConfigError
from statelink.wire import ENVIRONMENT, check_private

from ._options import LinkConfig, check_known, read_options

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

__all__ = ["CONFIG_VARIABLE", "PREFIX", "Given", "read_config"]

PREFIX = "STATELINK_"
"""What the names of variables begin with."""
CONFIG_VARIABLE = f"{PREFIX}CONFIG"
"""The variable that names the file if the engine names none."""
OTHERS = frozenset({CONFIG_VARIABLE, *ENVIRONMENT, *(f"{PREFIX}{name}PLUGINS" for name in ("", "STRICT_", "TRACE_"))})
"""Variables that do not stand for a key of `LinkConfig`."""
EXAMPLES = {"role": '"prefill"', "backend": '"auto"'}
"""Values for the keys that have no default, for hints."""
LISTS = frozenset({"siblings", "require"})
TEXTS = frozenset({"role", "backend", "listen", "advertise", "rendezvous", "verify"})
SWITCHES = frozenset({"insecure", "inspect"})
ELSEWHERE = frozenset({"keys"})
"""Keys that have variables of their own, because these read secrets with care."""
REFUSED = frozenset(f"{PREFIX}{key.upper()}" for key in ELSEWHERE)
"""Variables that look like keys of `LinkConfig`, and that nobody reads."""


class Given(NamedTuple):
    """A configuration, and where each of its keys was found.

    Attributes:
        config: The configuration.
        origins: Key to ``{"file": path}`` or ``{"variable": name}``. Keys of a mapping have no entry.
    """

    config: LinkConfig
    origins: Mapping[str, Mapping[str, str]]

    def origin(self, key: str) -> Mapping[str, str]:
        """Where a key was found, as name/value pairs for errors."""
        return self.origins.get(key, {})


def read_config(
    given: LinkConfig | Mapping[str, Any] | str | os.PathLike[str] | None,
    environment: Mapping[str, str] | None = None,
    *,
    assumed: Mapping[str, Any] | None = None,
) -> Given:
    """Read a configuration from what the engine gives.

    If this is a `LinkConfig` or a mapping, nothing else is read. A path is a TOML or JSON file; each environment
    variable takes precedence over it. ``None`` is the environment, and the file that ``STATELINK_CONFIG`` names, if it
    does.

    Args:
        given: What the engine gives.
        environment: Variables; those of the process by default.
        assumed: Values of keys that neither the file nor a variable has, for a reader that is not a link. They do not
            count as a configuration: with nothing else, there is none.

    Raises:
        ConfigError: The configuration cannot be read, a key is unknown or missing, or a value is of the wrong type. The
            error names the file or the variable, and the key.
    """
    variables = os.environ if environment is None else environment
    if isinstance(given, (LinkConfig, Mapping)):
        return Given(_read_given(given, variables), {})
    if given is not None and not isinstance(given, (str, os.PathLike)):
        raise ConfigError(
            "a configuration is a mapping, a path, or None for the environment",
            cause=f"got {type(given).__name__}",
            code="config.type",
        )
    path = variables.get(CONFIG_VARIABLE) if given is None else given
    values: dict[str, Any] = {}
    origins: dict[str, Mapping[str, str]] = {}
    if path:
        where = {"file": os.fspath(path)}
        values = _read_file(Path(path))
        # Checked before environment variables replace some of them.
        check_known(LinkConfig, values, "configuration of a link", where)
        origins = dict.fromkeys(values, where)
    for key, (name, value) in _read_environment(variables).items():
        values[key] = value
        origins[key] = {"variable": name}
    if not values and path:
        raise _unreadable(Path(path), "it holds no key", "a configuration has a 'role' and a 'backend' at least")
    if not values:
        raise ConfigError(
            "no configuration is given",
            cause=f"neither {CONFIG_VARIABLE} nor a variable such as {PREFIX}BACKEND is set",
            hint="pass a mapping or a path, or set them",
            code="config.file",
        )
    return Given(_convert({**(assumed or {}), **values}, origins), origins)


def _read_given(given: LinkConfig | Mapping[str, Any], variables: Mapping[str, str]) -> LinkConfig:
    """Read what the engine passes. If a key is missing, and the environment has it, the error says why that is so."""
    try:
        return LinkConfig.read(given)
    except ConfigError as error:
        needed = [field.name for field in msgspec.structs.fields(LinkConfig) if field.required]
        names = [f"{PREFIX}{key.upper()}" for key in needed if isinstance(given, Mapping) and key not in given]
        unread = [name for name in names if variables.get(name)]
        if not unread:
            raise
        hint = f"{' and '.join(unread)} {'is' if len(unread) == 1 else 'are'} not read beside a mapping; pass None"
        raise ConfigError.of(msgspec.structs.replace(error.reason, hint=hint)) from error


def _read_file(path: Path) -> dict[str, Any]:
    if path.suffix not in (".toml", ".json"):
        ending = f"its name ends in {path.suffix!r}" if path.suffix else "its name has no ending"
        raise _unreadable(path, ending, "name it *.toml or *.json")
    try:
        text = path.read_text(encoding="utf-8")
        found = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    except ValueError as error:  # not UTF-8, not TOML, not JSON
        raise _unreadable(path, str(error)) from error
    if not isinstance(found, dict):
        raise _unreadable(path, f"it holds {type(found).__name__}, and an object of keys is expected")
    if isinstance(found.get("keys"), Mapping) and found["keys"].get("secret"):
        check_private(path)
    return found


def _read_environment(variables: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    """Key to variable and value. Empty variables count as not set."""
    known = {f"{PREFIX}{key.upper()}": key for key in LinkConfig.__struct_fields__ if key not in ELSEWHERE}
    found = {}
    for name, text in variables.items():
        if name in REFUSED and text:
            raise ConfigError(
                f"{name} is set, and no such variable is read",
                cause="keys have variables of their own, which keep a secret out of the configuration",
                hint="set STATELINK_SECRET_FILE and STATELINK_ALLOW_FILE instead",
                code="config.key",
                variable=name,
            )
        if not name.startswith(PREFIX) or name in OTHERS or not text:
            continue
        if name in known:
            found[known[name]] = (name, _value(name, known[name], text))
            continue
        # A Kubernetes service of this name puts variables such as STATELINK_PORT into containers, so unknown ones are
        # allowed. But a variable that is nearly one of ours is a typing error.
        ours = [each.removeprefix(PREFIX) for each in (*known, *OTHERS)]
        close = difflib.get_close_matches(name.removeprefix(PREFIX), ours, n=1, cutoff=0.8)
        if close:
            raise ConfigError(
                "unknown key in the environment",
                cause=f"{name} is set, and means nothing",
                hint=f"did you mean {PREFIX}{close[0]}?",
                code="config.key",
                variable=name,
            )
    return found


def _value(name: str, key: str, text: str) -> Any:
    """A variable's value. Text is taken as it is, lists have commas or blanks, and everything else is JSON."""
    if key in TEXTS:
        return text
    if key in LISTS and not text.lstrip().startswith("["):
        return text.replace(",", " ").split()
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{name} cannot be read",
            cause=f"{text!r:.80} is not JSON: {error}",
            hint="write true or false" if key in SWITCHES else "",
            code="config.type",
            variable=name,
        ) from error


def _convert(values: Mapping[str, Any], origins: Mapping[str, Mapping[str, str]]) -> LinkConfig:
    """Convert all values. If they are refused, convert one at a time, to say where the wrong one was found."""
    try:
        config: LinkConfig = read_options(LinkConfig, values, "configuration of a link")
    except ConfigError as whole:
        for key, where in origins.items():
            base = {"role": "decode", "backend": "auto", **_partners(key, values)}
            try:
                read_options(LinkConfig, {**base, key: values[key]}, "configuration of a link")
            except ConfigError as error:
                raise _placed(error, where) from whole
        # A missing key has no origin. It could be added to the file.
        missing = next((origin for origin in origins.values() if "file" in origin), {})
        lacks = [key for key in EXAMPLES if key not in values]
        hints = [f"set {PREFIX}{key.upper()}, or {key} = {EXAMPLES[key]} in the file" for key in lacks]
        hinted = msgspec.structs.replace(whole.reason, hint=whole.reason.hint or "; ".join(hints))
        raise _placed(ConfigError.of(hinted), missing) from whole
    return config


def _partners(key: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values that are checked together."""
    group = {"liveness", "heartbeat"}
    together = group - {key} if key in group else set()
    return {name: values[name] for name in together if name in values}


def _placed(error: ConfigError, where: Mapping[str, str]) -> ConfigError:
    return ConfigError.of(msgspec.structs.replace(error.reason, who={**error.reason.who, **where}))


def _unreadable(path: Path, cause: str, hint: str = "") -> ConfigError:
    return ConfigError(
        "a configuration file cannot be read", cause=cause, hint=hint, code="config.file", file=str(path)
    )
