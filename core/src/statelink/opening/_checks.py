"""What can be checked of a link's configuration before there is an inventory. Opens nothing.

`statelink.open` makes these checks first, and stops at the first error. `statelink doctor` makes them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from statelink.errors import StatelinkError
from statelink.link import check_hash
from statelink.rendezvous._connect import check_directory, check_directory_options, load_directory
from statelink.telemetry import prepare
from statelink.wire import Keys, check_advertised, check_host, check_keys, check_listen, parse_endpoint

from ._select import check_options

if TYPE_CHECKING:
    from statelink.config import Given

__all__ = ["CHECKS", "ConfigCheck", "check_config"]


class ConfigCheck(NamedTuple):
    """One check.

    Attributes:
        key: The key that it is about. An error says where this key was found.
        reads: Keys that it reads.
        run: Raises a `StatelinkError`, or returns what was made of the key.
    """

    key: str
    reads: frozenset[str]
    run: Callable[[Given], Any]

    def __call__(self, given: Given) -> Any:
        """Run the check.

        Raises:
            StatelinkError: Something is wrong. The error names the file or the variable that has the key.
        """
        try:
            return self.run(given)
        except StatelinkError as error:
            who = {**error.reason.who, **given.origin(self.key)}
            raise type(error).of(msgspec.structs.replace(error.reason, who=who)) from error


def check_config(given: Given) -> Mapping[str, Any]:
    """Make every check.

    Returns:
        Key to what was made of it: ``telemetry``, its kinds with their options; ``keys``, those of the link.

    Raises:
        StatelinkError: The first thing that is wrong.
    """
    return {check.key: check(given) for check in CHECKS}


def _keys(given: Given) -> Keys | None:
    return check_keys(given.config.keys or Keys.from_environment())


def _listen(given: Given) -> None:
    config = given.config
    where = check_listen(config.listen, advertise=config.advertise, keys=_keys(given), insecure=config.insecure)
    check_host(where.host)


def _peers(given: Given) -> None:
    for address in (each for addresses in given.config.peers.values() for each in addresses):
        parse_endpoint(address)


def _siblings(given: Given) -> None:
    for address in given.config.siblings:
        parse_endpoint(address)


def _rendezvous(given: Given) -> None:
    if given.config.rendezvous:
        load_directory(given.config)


def _directory(given: Given) -> None:
    check_directory(given.config, keys=_keys(given))


def _verify(given: Given) -> None:
    if given.config.verify != "off":
        check_hash()


CHECKS: Final = tuple(
    ConfigCheck(reads[0], frozenset(reads), run)
    for reads, run in (
        (("telemetry",), lambda given: prepare(given.config.telemetry)),
        (("keys",), _keys),
        (("listen", "advertise", "insecure", "keys"), _listen),
        (("advertise",), lambda given: check_advertised(given.config.advertise)),
        (("peers",), _peers),
        (("siblings",), _siblings),
        (("rendezvous",), _rendezvous),
        (("rendezvous_options", "rendezvous"), lambda given: check_directory_options(given.config)),
        (("rendezvous", "rendezvous_options", "insecure", "keys"), _directory),
        (("verify",), _verify),
        (("options", "backend"), check_options),
    )
)
"""Every check, in the order of `statelink.open`."""
