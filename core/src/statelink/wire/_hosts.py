"""Finds the IP addresses behind the host names of a configuration."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from typing import NamedTuple

from statelink.errors import ConfigError

__all__ = [
    "WILDCARDS",
    "DataHosts",
    "check_advertised",
    "check_host",
    "data_hosts",
    "is_interface",
    "numeric",
    "only_this_host",
]

SIOCGIFADDR = 0x8915
"""Asks Linux for the IPv4 address of an interface."""
WILDCARDS = frozenset({"*", "0.0.0.0", "::"})
"""Hosts that stand for every interface."""


class DataHosts(NamedTuple):
    """Where a backend listens, and under which address peers reach it.

    Attributes:
        host: IP address that peers are told.
        listen: IP address at which to listen.
    """

    host: str
    listen: str


def numeric(host: str) -> str:
    """An IP address in its shortest form: one of IPv4 that is written as IPv6 becomes one of IPv4."""
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def is_interface(host: str) -> bool:
    """Whether this host has a network interface of this name."""
    return any(host == name for _, name in socket.if_nameindex())


def interface_addresses(name: str) -> list[str]:
    """The IP addresses of a network interface of this host, in their shortest form; empty if it has none.

    Only Linux tells them. Elsewhere there are none.
    """
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        # The kernel wants a name of at most 15 bytes in a field of 16, and answers with an address behind it.
        answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("16s240x", name.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
        rows = [line.split() for line in table]
        found += [numeric(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))) for row in rows if row[-1] == name]
    return found


def only_this_host(host: str) -> bool:
    """Whether a socket that listens at this host can be reached from this machine alone.

    The name of an interface, such as ``lo``, is judged by all of its addresses.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    if not is_interface(host):
        return host == "localhost"
    addresses = interface_addresses(host)
    return bool(addresses) and all(ipaddress.ip_address(each).is_loopback for each in addresses)


def check_advertised(host: str) -> None:
    """Check the host under which peers reach a link; empty if that is the listening host. May ask a name server.

    Raises:
        ConfigError: It is a name that cannot be resolved, or no address that a peer can dial.
    """
    if host:
        _advertised(host, "")


def check_host(host: str) -> None:
    """Check the host at which a link listens: a name, an IP address, or an interface. May ask a name server.

    Raises:
        ConfigError: It is a name that cannot be resolved.
    """
    if host in WILDCARDS or is_interface(host):
        return
    try:
        _resolved(host, "")
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"cannot listen at host {host!r:.80}",
            cause=f"it is neither a network interface nor a name that can be resolved: {_words(error)}",
            hint="write an IP address of this host: see `ip address`",
            code="config.listen",
        ) from error


def data_hosts(bound: str, advertise: str) -> DataHosts:
    """The addresses for a backend of a link.

    Args:
        bound: IP address at which the link listens.
        advertise: The host under which peers reach it; empty if that is the same.

    Raises:
        ConfigError: The name in ``advertise`` cannot be resolved.
    """
    if not advertise:
        return DataHosts(bound, bound)
    host = _advertised(advertise, bound)
    if bound in WILDCARDS:
        return DataHosts(host, "::" if ":" in host else "0.0.0.0")
    return DataHosts(host, bound)


def _advertised(advertise: str, beside: str) -> str:
    try:
        host = _resolved(advertise, beside)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"the advertised host {advertise!r:.80} cannot be resolved",
            cause=_words(error),
            hint="write a host name that this host and its peers can resolve, or an IP address; without a port",
            code="config.advertise",
        ) from error
    if host in WILDCARDS:
        raise ConfigError(
            f"the advertised host {advertise!r:.80} is no address that a peer can dial",
            hint="set 'advertise' to the host under which peers reach this process",
            code="config.advertise",
        )
    return host


def _resolved(host: str, beside: str) -> str:
    """The IP address of a host. Of several, the first of the family of ``beside``, or else the first of all.

    Raises:
        OSError: It has none.
        UnicodeError: It is no name of a host.
    """
    try:
        return numeric(host)
    except ValueError:
        pass
    found = [numeric(str(each[4][0])) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    like = [each for each in found if (":" in each) == (":" in beside)]
    return like[0] if beside and beside != "::" and like else found[0]


def _words(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error)
