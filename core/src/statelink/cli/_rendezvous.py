"""``statelink rendezvous``: runs the server that knows the addresses of instances."""

from __future__ import annotations

import signal
import threading

import click

from statelink.rendezvous import RendezvousServer
from statelink.wire import Keys

from ._output import json_option, print_json

__all__ = ["rendezvous"]


@click.command()
@click.option(
    "--listen",
    default="tcp://127.0.0.1:7400",
    show_default=True,
    help="Listen at this address; port 0 picks a free one.",
)
@click.option("--advertise", default="", help="Tell links this host instead of the one in --listen.")
@click.option(
    "--secret-file", default="", help="Read the server's secret key from this file; `statelink keys new` makes one."
)
@click.option(
    "--allow-file",
    default="",
    help="Let in links with the public keys of this file, or of the *.pub files of this directory.",
)
@click.option("--insecure", is_flag=True, help="Listen beyond loopback without keys; for trusted networks only.")
@click.option(
    "--lifetime", default=15.0, show_default=True, help="Forget a rank that was silent for this many seconds."
)
@json_option
def rendezvous(
    listen: str, advertise: str, secret_file: str, allow_file: str, insecure: bool, lifetime: float, as_json: bool
) -> None:
    """Run a rendezvous server.

    Runs until SIGINT or SIGTERM, and then exits with 0. Prints the address that links configure as `rendezvous`.
    Without options for keys, the keys come from the environment: STATELINK_SECRET_FILE or STATELINK_SECRET,
    STATELINK_ALLOW_FILE or STATELINK_ALLOW.
    """
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    given = bool(secret_file or allow_file)
    keys = Keys(secret_file=secret_file, allow_file=allow_file) if given else Keys.from_environment()
    with RendezvousServer(listen, advertise=advertise, keys=keys, insecure=insecure, lifetime=lifetime) as server:
        if as_json:
            print_json({"address": server.address})
        else:
            click.echo(server.address)
        ended.wait()
