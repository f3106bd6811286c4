"""CURVE keys, given directly, in files or in the environment, and the checks of them."""

from __future__ import annotations

import base64
import functools
import os
import re
import stat
import struct
from collections.abc import Mapping
from pathlib import Path

import msgspec
import zmq
import zmq.utils.z85

from statelink.errors import ConfigError

__all__ = ["ENVIRONMENT", "Keys", "check_key", "check_private", "key_from_url", "key_to_url", "read_secret"]

MAX_FILE = 4 << 20
"""Most bytes of a file of keys."""
MAX_ALLOWED = 65536
"""Most keys of one allow-list."""
SUFFIX = ".pub"
"""The files of an allow directory that are read."""
IN_URL = re.compile(r"[A-Za-z0-9_-]{43}")
"""A key as in an address."""
ENVIRONMENT = {
    "STATELINK_SECRET": "secret",
    "STATELINK_SECRET_FILE": "secret_file",
    "STATELINK_ALLOW": "allow",
    "STATELINK_ALLOW_FILE": "allow_file",
}
"""Environment variable to the field of `Keys` that it sets."""


class Keys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CURVE keys of one link. Files are read once, when the object is made.

    Attributes:
        secret: This link's secret key, 40 characters of Z85. Its public key is derived from it.
        secret_file: A file with the secret key, instead of ``secret``. Only its owner may change it, and only its
            group may read it.
        allow: Public keys of the links that may connect to this one, and to which this one may connect.
        allow_file: More public keys: a file with one key on each line, or a directory with such files named ``*.pub``.
    """

    secret: str = ""
    secret_file: str = ""
    allow: tuple[str, ...] = ()
    allow_file: str = ""

    def __post_init__(self) -> None:
        if bool(self.secret) == bool(self.secret_file):
            raise _unusable(
                "keys need one secret",
                f"{'both' if self.secret else 'neither'} of 'secret' and 'secret_file' are given",
                "statelink keys new FILE makes one",
            )
        secret = self.secret or read_secret(self.secret_file)
        check_key("keys.secret", secret)
        for key in self.allow:
            check_key("keys.allow", key)
        allow = dict.fromkeys((*self.allow, *(read_allowed(self.allow_file) if self.allow_file else ())))
        if secret in allow:
            raise _unusable(
                "the allow-list holds this link's secret key", "public keys are allowed", "statelink keys show FILE"
            )
        if len(allow) > MAX_ALLOWED:
            raise _unusable(f"{len(allow)} keys are allowed", f"an allow-list has at most {MAX_ALLOWED}")
        msgspec.structs.force_setattr(self, "secret", secret)
        msgspec.structs.force_setattr(self, "secret_file", "")
        msgspec.structs.force_setattr(self, "allow", tuple(allow))
        msgspec.structs.force_setattr(self, "allow_file", "")

    @staticmethod
    def in_address(address: str) -> str:
        """The public key in the address of a link, 40 characters of Z85; empty if it has none.

        Args:
            address: ``tcp://host:port`` or ``tcp://host:port@key``, with a key of 43 characters of base64url.

        Raises:
            ConfigError: What stands for the key is none.
        """
        where, found, written = address.partition("@")
        return key_from_url(f"the key in address {where!r:.120}", written) if found else ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Keys | None:
        """Keys from the variables ``STATELINK_`` with ``SECRET``, ``SECRET_FILE``, ``ALLOW`` and ``ALLOW_FILE``.

        ``STATELINK_ALLOW`` holds public keys with spaces or commas between them. An empty variable counts as not set.

        Returns:
            The keys, or ``None`` if no variable is set.

        Raises:
            ConfigError: The keys cannot be used. The error says which variables are set.
        """
        given = os.environ if environment is None else environment
        named = {name: given[name] for name in ENVIRONMENT if given.get(name)}
        if not named:
            return None
        allow = tuple(named.pop("STATELINK_ALLOW", "").replace(",", " ").split())
        try:
            return cls(**{ENVIRONMENT[name]: value for name, value in named.items()}, allow=allow)
        except ConfigError as error:
            reason = error.reason
            set_ = ", ".join(name for name in ENVIRONMENT if given.get(name))
            raise _unusable(
                "the keys in the environment cannot be used",
                f"{reason.what}{': ' if reason.cause else ''}{reason.cause} (set: {set_})",
                reason.hint,
            ) from error

    @property
    def public(self) -> str:
        """The public key that belongs to the secret one."""
        return bytes(zmq.curve_public(self.secret.encode())).decode()

    def __repr__(self) -> str:
        return f"Keys(public={self.public!r}, secret=..., {len(self.allow)} allowed)"


def check_key(what: str, key: str) -> None:
    """Check that a text is a CURVE key.

    Raises:
        ConfigError: It is none. The error does not repeat the text, because it may be a mistyped secret.
    """
    if not _is_key(key):
        raise _unusable(f"{what} is not a CURVE key", "40 characters of Z85 are expected")


@functools.lru_cache(maxsize=4096)
def key_to_url(key: str) -> str:
    """A key as in an address: 43 characters of base64url instead of 40 of Z85."""
    return base64.urlsafe_b64encode(zmq.utils.z85.decode(key.encode("ascii"))).decode().rstrip("=")


def key_from_url(what: str, text: str) -> str:
    """The key that is written in base64url.

    Raises:
        ConfigError: The text is no key. The error calls it ``what``.
    """
    if IN_URL.fullmatch(text):
        key = zmq.utils.z85.encode(base64.urlsafe_b64decode(f"{text}=")).decode()
        if key_to_url(key) == text:  # the last character has two bits that have to be 0
            return key
    raise _unusable(
        f"{what} is not a CURVE key", "43 characters of base64url are expected", "statelink keys show FILE --address"
    )


def read_secret(path: str | Path) -> str:
    """The one key in a file. Others must not be able to read the file.

    Raises:
        ConfigError: The file cannot be read, others may read or change it, or it does not hold one key.
    """
    if Path(path).suffix == SUFFIX and Path(path).is_file():
        raise _unusable(f"{path} holds a public key", "the secret key is needed", f"name {Path(path).with_suffix('')}")
    entries = _entries(Path(path), secret=True)
    if len(entries) != 1:
        raise _unusable(f"{path} does not hold one secret key", f"it has {len(entries)} lines with a key")
    return entries[0]


def read_allowed(path: str | Path) -> tuple[str, ...]:
    """The public keys in a file, or in the ``*.pub`` files of a directory.

    Raises:
        ConfigError: A file cannot be read, or a line of it is no key.
    """
    where = Path(path)
    try:
        # Sorted, so that the error is the same on every machine. Mounted secrets are symbolic links, which are
        # followed.
        files = sorted(where.glob(f"*{SUFFIX}")) if where.is_dir() else [where]
    except OSError as error:
        raise _unusable(f"{where} cannot be read", error.strerror or str(error)) from error
    found = [(file, _entries(file, secret=False)) for file in files]
    for file, keys in found:
        _refuse_secret(file, keys)
    return tuple(key for _, keys in found for key in keys)


def _refuse_secret(file: Path, keys: list[str]) -> None:
    """Refuse a secret key in the place of a public one. The file of its public key beside it tells them apart.

    Raises:
        ConfigError: The file holds a secret key.
    """
    beside = file.with_name(f"{file.name}{SUFFIX}")
    try:
        public = _entries(beside, secret=False) if len(keys) == 1 else []
    except ConfigError:  # there is no such file, or it holds something else
        return
    if public and bytes(zmq.curve_public(keys[0].encode())).decode() in public:
        raise _unusable(f"{file} holds a secret key", "public keys are allowed", f"name {beside}")


def _entries(path: Path, *, secret: bool) -> list[str]:
    text = _read(path, secret=secret)
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        # Z85 has the character `#`, but no key begins with it: the first of five characters is at most number 82 of 84.
        if not words or words[0].startswith("#"):
            continue
        if not _is_key(words[0]) or (secret and len(words) > 1):
            raise _unusable(
                f"{path}, line {number}: no CURVE key",
                "40 characters of Z85 are expected" + ("" if secret else ", and after a blank whatever you like"),
            )
        found.append(words[0])
    return found


def _read(path: Path, *, secret: bool) -> str:
    try:
        # O_NONBLOCK: do not wait for the other end of a pipe. The open file is checked, so that it is the file that is
        # read.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _unusable(f"{path} cannot be read", "it is not a file")
            if secret:
                _refuse_shared(path, status)
            raw = file.read(MAX_FILE + 1)
    except OSError as error:
        raise _unusable(
            f"{path} cannot be read",
            error.strerror or str(error),
            f"statelink keys new {path}" if secret and isinstance(error, FileNotFoundError) else "",
        ) from error
    if len(raw) > MAX_FILE:
        raise _unusable(f"{path} cannot be read", f"it is longer than {MAX_FILE} bytes")
    try:
        return raw.decode("ascii")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise _unusable(f"{path}, line {line}: no CURVE key", "it is not ASCII text") from error


def check_private(path: Path) -> None:
    """Check that only its owner and group can read a file with a secret.

    Raises:
        ConfigError: Others may read or change it, or another user owns it.
    """
    _refuse_shared(path, path.stat())


def _refuse_shared(path: Path, status: os.stat_result) -> None:
    """Refuse a file that others can read. Its group may, because secrets are mounted into containers in this way."""
    mode = stat.S_IMODE(status.st_mode)
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise _unusable(f"{path} is open to others", f"its mode is {mode:04o}", f"chmod 600 {path}")
    if status.st_uid not in (0, os.geteuid()):
        raise _unusable(f"{path} is somebody else's", f"its owner is user {status.st_uid}, not {os.geteuid()}")


def _is_key(key: str) -> bool:
    try:
        return len(key) == 40 and len(zmq.utils.z85.decode(key.encode("ascii"))) == 32
    except (ValueError, KeyError, struct.error):
        return False


def _unusable(what: str, cause: str, hint: str = "") -> ConfigError:
    return ConfigError(what, cause=cause, hint=hint, code="config.keys")
