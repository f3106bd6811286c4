"""Where etcd is, and how a link proves to it who it is."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import msgspec

from statelink.errors import ConfigError
from statelink.rendezvous import check_private, is_loopback

from ._gateway import Login

if TYPE_CHECKING:
    from statelink.rendezvous import DirectoryConfig

__all__ = ["Cluster", "Options"]

SCHEMES = {"etcd": "http", "etcds": "https"}
PREFIX = "/statelink"
"""What keys begin with, if the address names nothing else."""
DAY = 86400
EXAMPLE = "write etcd://host:2379, or etcds://host:2379 for TLS; several members with commas between them"


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options for etcd, in the table ``rendezvous_options``.

    Attributes:
        user: Name of a user of etcd that may read and write the keys below the prefix. Not needed while etcd's
            authentication is off.
        password_file: File with the user's password, which others must not be able to read.
        ca_file: Certificates of authorities that are trusted, in PEM; the system's by default.
        cert_file: The client's certificate in PEM, for a cluster that wants one. While etcd's authentication is on,
            its HTTP gateway refuses a certificate that has a common name.
        key_file: Its key, unless ``cert_file`` has it.
        lifetime: Whole seconds after which a silent rank expires. Etcd may take longer, never shorter.
    """

    user: str = ""
    password_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    lifetime: int = 15


class Cluster(NamedTuple):
    """A cluster of etcd, as a link is configured for it.

    Attributes:
        members: Base URLs of the members' client ports.
        where: The same as a text for errors and logs.
        prefix: What every key begins with, without a slash at its end.
        login: How the link proves who it is.
        lifetime: Seconds after which a silent rank expires.
    """

    members: tuple[str, ...]
    where: str
    prefix: str
    login: Login
    lifetime: int

    @classmethod
    def of(cls, config: DirectoryConfig) -> Cluster:
        """Read what a link is configured with: ``etcd://host:port,host:port/prefix``, or ``etcds://`` for TLS.

        Raises:
            ConfigError: The address, an option or a file cannot be used, or the password would travel in the clear.
        """
        address, options = config.address, config.options
        if not 0 < options.lifetime <= DAY:
            # An integer may have more digits than Python writes.
            which = f"more than {DAY} seconds" if options.lifetime > 0 else "not above zero"
            raise _unusable("lifetime must be above zero and at most a day", f"it is {which}")
        scheme, _, rest = address.partition("://")
        hosts, slash, path = rest.partition("/")
        members = hosts.split(",")
        for member in members:
            _check_member(member, address)
        tls = scheme == "etcds"
        if options.user and not tls and not config.insecure:
            open_to = [member for member in members if not is_loopback(member)]
            if open_to:
                raise _unusable(
                    "the password for etcd would travel in the clear",
                    f"{open_to[0]} is not on loopback, and etcd:// is without TLS",
                    "use etcds://, or set 'insecure' on a network that you trust wholly",
                )
        login = Login(options.user, _password(options), _tls(options) if tls else None)
        if not tls and (options.ca_file or options.cert_file or options.key_file):
            raise _unusable("certificates are configured for etcd", "etcd:// is without TLS", "use etcds://")
        urls = tuple(f"{SCHEMES[scheme]}://{member}" for member in members)
        prefix = f"/{path.strip('/')}" if slash and path.strip("/") else PREFIX
        return cls(urls, ", ".join(members), prefix, login, options.lifetime)


def _check_member(member: str, address: str) -> None:
    try:
        parts = urlsplit(f"//{member}")
        good = bool(parts.hostname) and parts.port is not None and parts.username is None and parts.netloc == member
    except ValueError:
        good = False
    if not good:
        raise _unusable(f"{address!r:.120} is no address of etcd", f"{member!r:.80} is not host:port", EXAMPLE)


def _password(options: Options) -> str:
    if bool(options.user) != bool(options.password_file):
        missing = "password_file" if options.user else "user"
        raise _unusable("a user and a password for etcd go together", f"{missing!r} is not configured")
    if not options.user:
        return ""
    path = Path(options.password_file)
    try:
        check_private(path)
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable("password_file", path, error) from error


def _tls(options: Options) -> ssl.SSLContext:
    if options.key_file and not options.cert_file:
        raise _unusable("a key for etcd has no certificate", "'cert_file' is not configured")
    made, name, file = ssl.create_default_context(), "ca_file", options.ca_file
    try:
        if options.ca_file:
            made = ssl.create_default_context(cafile=options.ca_file)
        if options.cert_file:
            name, file = "cert_file", options.cert_file
            made.load_cert_chain(options.cert_file, options.key_file or None)
    except OSError as error:  # ssl.SSLError among them
        raise _unreadable(name, Path(file), error) from error
    return made


def _unreadable(name: str, path: Path, error: Exception) -> ConfigError:
    why = getattr(error, "strerror", None) or error
    return _unusable(f"{name} of etcd cannot be used", f"{path}: {why}")


def _unusable(what: str, cause: str, hint: str = "") -> ConfigError:
    return ConfigError(what, cause=cause, hint=hint, code="config.etcd")
