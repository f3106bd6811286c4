"""``statelink rendezvous``: runs the server that knows the addresses of instances."""

from __future__ import annotations

import signal
import threading

import click

from statelink.errors import StatelinkError
from statelink.rendezvous import RendezvousServer
from statelink.wire import Keys

__all__ = ["rendezvous"]


@click.command()
@click.option("--listen", default="tcp://127.0.0.1:7400", show_default=True, help="Where to listen; port 0 picks one.")
@click.option("--advertise", default="", help="Host under which links reach it; the listening host by default.")
@click.option("--secret-file", default="", help="Its secret key; see `statelink keys new`.")
@click.option("--allow-file", default="", help="Public keys of the links: a file, or a directory of *.pub files.")
@click.option("--insecure", is_flag=True, help="Listen beyond loopback without keys, on a network trusted wholly.")
@click.option("--lifetime", default=15.0, show_default=True, help="Seconds until a silent rank is forgotten.")
def rendezvous(listen: str, advertise: str, secret_file: str, allow_file: str, insecure: bool, lifetime: float) -> None:
    """Run a rendezvous server until SIGINT or SIGTERM.

    Prints the address that links configure as `rendezvous`. Without options for keys, the keys come from the
    environment: STATELINK_SECRET_FILE or STATELINK_SECRET, STATELINK_ALLOW_FILE or STATELINK_ALLOW.
    """
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        given = bool(secret_file or allow_file)
        keys = Keys(secret_file=secret_file, allow_file=allow_file) if given else Keys.from_environment()
        server = RendezvousServer(listen, advertise=advertise, keys=keys, insecure=insecure, lifetime=lifetime)
    except StatelinkError as error:
        raise click.ClickException(str(error)) from error
    with server:
        click.echo(server.address)
        ended.wait()
