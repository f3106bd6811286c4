"""``statelink rendezvous --list``: what is registered in a directory."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from statelink.config import LinkConfig, read_config
from statelink.errors import StatelinkError
from statelink.rendezvous import Instance, list_instances
from statelink.rendezvous._connect import load_directory
from statelink.wire import Keys

from ._configured import BY_ENGINE
from ._output import plain_error, print_json
from ._words import counted

__all__ = ["DEFAULT", "list_directory"]

DEFAULT = "tcp://127.0.0.1:7400"
"""Where a rendezvous server listens, and is looked for, if nothing else is said."""


def list_directory(
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
