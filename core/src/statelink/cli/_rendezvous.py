"""``statelink rendezvous``: runs the server that knows the addresses of instances, or lists what a directory knows."""

from __future__ import annotations

import signal
import threading

import click
import msgspec
from click.core import ParameterSource

from statelink.errors import ConfigError
from statelink.rendezvous import RendezvousServer
from statelink.wire import Keys

from ._configured import key_fields
from ._directory import DEFAULT, list_directory
from ._output import json_option, print_json

__all__ = ["rendezvous"]


SERVING = {"listen": "--listen", "advertise": "--advertise", "lifetime": "--lifetime"}
"""Options that only a server has."""
HINTS = {
    "config.insecure": "set --secret-file and --allow-file, or --insecure on a network that you trust wholly",
    "config.keys": "name the public keys of the links with --allow-file, or in STATELINK_ALLOW_FILE",
    "config.advertise": "set --advertise to the host under which links reach it",
}
"""What to do about errors of a link that is configured in this way, in the options of this command."""


@click.command()
@click.argument("address", default="")
@click.option("--list", "listing", is_flag=True, help="List what is registered in a directory, and run no server.")
@click.option(
    "--listen",
    default=DEFAULT,
    show_default=True,
    help="Listen at this address; port 0 picks a free one.",
)
@click.option("--advertise", default="", help="Tell links this host instead of the one in --listen.")
@click.option("--secret-file", default="", help="Read the secret key from this file; `statelink keys new` makes one.")
@click.option(
    "--allow-file",
    default="",
    help="Allow the public keys of this file, or of the *.pub files of this directory.",
)
@click.option("--insecure", is_flag=True, help="Do without keys or TLS beyond loopback; for trusted networks only.")
@click.option(
    "--lifetime", default=15.0, show_default=True, help="Forget a rank that was silent for this many seconds."
)
@click.option(
    "--expect",
    "expected",
    metavar="NAME",
    multiple=True,
    help="With --list: exit with 1 unless this instance is there. May be repeated.",
)
@json_option
@click.pass_context
def rendezvous(
    context: click.Context,
    address: str,
    listing: bool,
    listen: str,
    advertise: str,
    secret_file: str,
    allow_file: str,
    insecure: bool,
    lifetime: float,
    expected: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run a rendezvous server, or list what is registered.

    The server runs until SIGINT or SIGTERM, and then exits with 0. It prints the address that links configure as
    `rendezvous`. What --secret-file or --allow-file does not give comes from the environment: STATELINK_SECRET_FILE or
    STATELINK_SECRET, STATELINK_ALLOW_FILE or STATELINK_ALLOW.

    With --list, prints the instances in the directory at ADDRESS, a rendezvous server or another one, with the ranks
    that are present and their addresses. Without ADDRESS, it is the directory of STATELINK_RENDEZVOUS or of the file
    STATELINK_CONFIG, or else a server on this machine. Keys and options are those of a link, too. Exits with 1
    if a rank of an instance is missing, an instance named with --expect is not there, or the directory does not answer.
    A rank that was killed is listed for up to the --lifetime of the server.
    """
    given = [name for key, name in SERVING.items() if context.get_parameter_source(key) is not ParameterSource.DEFAULT]
    if listing and given:
        raise click.UsageError(f"{given[0]} is for a server, and --list runs none")
    if address and not listing:
        raise click.UsageError("ADDRESS goes with --list; a server listens at --listen")
    if expected and not listing:
        raise click.UsageError("--expect goes with --list")
    named = key_fields(secret_file, allow_file)
    if listing:
        context.exit(list_directory(address, named, expected, insecure=insecure, as_json=as_json))
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    keys = Keys(**named) if named else Keys.from_environment()
    try:
        made = RendezvousServer(listen, advertise=advertise, keys=keys, insecure=insecure, lifetime=lifetime)
    except ConfigError as error:
        raise _in_options(error) from error
    with made as server:
        if as_json:
            print_json({"address": server.address})
        else:
            click.echo(server.address)
        ended.wait()


def _in_options(error: ConfigError) -> ConfigError:
    """The error of a server, where its words are those of a link."""
    if error.code not in HINTS:
        return error
    what = error.reason.what.replace("this link", "this server")
    return ConfigError.of(msgspec.structs.replace(error.reason, what=what, hint=HINTS[error.code]))
