"""Where etcd is, and how a link proves to it who it is."""

from __future__ import annotations

import importlib.util
import ssl
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from statelink.config import Etcd
from statelink.errors import ConfigError
from statelink.hints import install_hint
from statelink.wire import check_private, is_loopback

from ._gateway import Login

__all__ = ["Cluster", "is_etcd"]

SCHEMES = {"etcd": "http", "etcds": "https"}
PREFIX = "/statelink"
"""What keys begin with, if the address names nothing else."""
EXAMPLE = "write etcd://host:2379, or etcds://host:2379 for TLS; several members with commas between them"


def is_etcd(address: str) -> bool:
    """Whether an address of a rendezvous is one of etcd."""
    return address.partition("://")[0] in SCHEMES


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
    def of(cls, address: str, options: Etcd | None = None, *, insecure: bool = False) -> Cluster:
        """Read the address of a rendezvous, and the options for etcd.

        Args:
            address: ``etcd://host:port,host:port/prefix``; ``etcds://`` for TLS. The prefix may be left out.
            options: User, certificates and lifetime.
            insecure: Whether a password may travel beyond loopback without TLS.

        Raises:
            ConfigError: The address or a file cannot be used, the client's library is not installed, or the password
                would travel in the clear.
        """
        options = options or Etcd()
        if importlib.util.find_spec("aiohttp") is None:
            raise ConfigError(
                "etcd cannot be used as a rendezvous",
                cause="the package aiohttp is not installed",
                hint=install_hint("statelink[etcd]"),
                code="config.etcd",
            )
        scheme, _, rest = address.partition("://")
        hosts, slash, path = rest.partition("/")
        members = hosts.split(",")
        for member in members:
            _check_member(member, address)
        tls = scheme == "etcds"
        if options.user and not tls and not insecure:
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


def _password(options: Etcd) -> str:
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


def _tls(options: Etcd) -> ssl.SSLContext:
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
