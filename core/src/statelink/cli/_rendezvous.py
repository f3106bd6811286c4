"""``statelink rendezvous``: runs the server that knows the addresses of instances, or lists what a directory knows."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Collection, Mapping
from typing import Any

import click
import msgspec
from click.core import ParameterSource
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from statelink.config import LinkConfig, read_config
from statelink.errors import ConfigError, StatelinkError
from statelink.rendezvous import Instance, RendezvousServer, list_instances
from statelink.rendezvous._connect import load_directory
from statelink.wire import Keys

from ._configured import BY_ENGINE, key_fields
from ._output import json_option, plain_error, print_json
from ._words import counted

__all__ = ["rendezvous"]

DEFAULT = "tcp://127.0.0.1:7400"
"""Where a rendezvous server listens, and is looked for, if nothing else is said."""


def _list_directory(
    address: str, named: Mapping[str, Any] | None, expected: Collection[str], *, insecure: bool, as_json: bool
) -> int:
    """Print what is registered in a directory.

    Args:
        address: The directory's. If it is empty, the one that a link would use here, or `DEFAULT`.
        named: Fields of the keys to ask with. ``None``: the keys that a link would use here.
        expected: Instances that have to be there.
        insecure: Whether secrets may travel beyond loopback without keys or TLS.
        as_json: Whether to print JSON.

    Returns:
        The exit status: 1 if links do not find one of the instances, or one that is expected.

    Raises:
        ConfigError: The address, a key, a file or an option cannot be used.
        PeerError: The directory does not answer, or refuses.
    """
    try:
        config = _config(address, insecure)
        found = list_instances(config, keys=_keys(config, named))
    except StatelinkError as error:
        if as_json:
            print_json({"rendezvous": address, "error": plain_error(error)})
        raise
    if as_json:
        print_json({"rendezvous": config.rendezvous, "instances": [_plain(each) for each in found]})
    else:
        Console().print(_render(config.rendezvous, found))
    absent = sorted(set(expected) - {each.name for each in found})
    for name in absent:
        click.echo(f"instance {name!r} is not registered", err=True)
    return 0 if not absent and all(each.complete for each in found) else 1


def _keys(config: LinkConfig, named: Mapping[str, Any] | None) -> Keys | None:
    """The keys to ask with, if the directory takes any."""
    if not load_directory(config).takes_keys:
        return None
    return Keys(**named) if named is not None else config.keys or Keys.from_environment()


def _config(address: str, insecure: bool) -> LinkConfig:
    """The configuration of a link here, with this directory."""
    # `read_config` needs at least one variable. So this sets the one of the backend, which a list does not use.
    given = {"STATELINK_BACKEND": BY_ENGINE["backend"], **os.environ}
    if insecure:
        given["STATELINK_INSECURE"] = "true"
    if address:
        given["STATELINK_RENDEZVOUS"] = address
    return read_config(None, given, assumed={**BY_ENGINE, "rendezvous": DEFAULT}).config


def _plain(instance: Instance) -> dict[str, Any]:
    return {
        "instance": instance.name,
        "ranks": instance.ranks,
        "present": len(instance.registered),
        "missing": instance.missing,
        "complete": instance.complete,
        "wrong": instance.wrong,
        "registered": [each._asdict() for each in instance.registered],
    }


def _render(directory: str, found: list[Instance]) -> RenderableType:
    where = directory.partition("@")[0]
    if not found:
        return Text(f"{where}: nothing is registered")
    head = f"{where}: {counted(len(found), 'instance')}, {counted(sum(len(each.registered) for each in found), 'rank')}"
    table = Table(box=None, pad_edge=False)
    table.add_column("instance", overflow="fold")
    table.add_column("present", no_wrap=True)
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("address", overflow="fold")
    for instance in found:
        first = (instance.name, f"{len(instance.registered)} of {instance.ranks or '?'}")
        rows = [(str(each.rank), _short(each.address), "") for each in instance.registered]
        if instance.missing:
            rows.append(("-", f"missing: {_ranges(instance.missing)}", "red"))
        if instance.wrong:
            rows.append(("-", instance.wrong, "red"))
        for number, (rank, address, style) in enumerate(rows):
            table.add_row(*map(Text, (*(first if not number else ("", "")), rank, address)), style=style)
    return Group(Text(head, style="bold"), table)


def _short(address: str) -> str:
    """An address without its key."""
    return address.partition("@")[0]


def _ranges(numbers: list[int]) -> str:
    """Numbers in order, such as ``1, 4-7``."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, each)) for each in ranges)


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
        context.exit(_list_directory(address, named, expected, insecure=insecure, as_json=as_json))
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
