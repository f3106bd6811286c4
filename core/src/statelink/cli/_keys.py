"""``statelink keys``: makes keys, and shows which public key belongs to a secret one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import click
import zmq

from statelink.wire import Endpoint, Keys, parse_endpoint, read_secret

from ._output import json_option, print_json, unwritable

__all__ = ["keys"]


@click.group()
def keys() -> None:
    """Make and show keys.

    Links and the rendezvous server authenticate with them.
    """


@keys.command()
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def new(file: Path, as_json: bool) -> None:
    """Make a key pair.

    Writes the secret key to FILE, with mode 0600, and the public key to FILE.pub. Existing files are not overwritten.
    """
    beside = file.with_name(f"{file.name}.pub")
    for each in (file, beside):
        if os.path.lexists(each):
            raise click.ClickException(f"{each} exists already, and is not overwritten")
    public, secret = (part.decode() for part in zmq.curve_keypair())
    try:
        with _written(file, secret, 0o600), _written(beside, public, 0o644):
            pass
    except OSError as error:
        raise unwritable(error, file) from error
    if as_json:
        print_json({"secret_file": str(file), "public_file": str(beside), "public": public})
        return
    click.echo(f"secret key: {file} (mode 0600; it stays where its process runs)")
    click.echo(f"public key: {beside}")
    click.echo(f"\n{public}\n")
    click.echo(
        "This process uses it with   STATELINK_SECRET_FILE, or secret_file in 'keys' of its link's configuration."
    )
    click.echo(f"Others let it in with       {beside.name} in their allow directory, or its line in their allow file:")
    click.echo("                            STATELINK_ALLOW_FILE, or allow_file in 'keys'.")


@keys.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--address", default="", metavar="tcp://HOST:PORT", help="Print this address, with the key in it.")
@json_option
def show(file: Path, address: str, as_json: bool) -> None:
    """Print the public key of a secret key.

    FILE holds the secret key.
    """
    public = Keys(secret=read_secret(file)).public
    whole = str(Endpoint(parse_endpoint(address).address, public)) if address else ""
    if as_json:
        print_json({"public": public, "address": whole})
    else:
        click.echo(whole or public)


@contextlib.contextmanager
def _written(file: Path, key: str, mode: int) -> Iterator[None]:
    """Write a new file, and remove it if that fails, or if the block does. What is half made could not be used.

    Never follows an existing link, and the file is never readable by others.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "w", encoding="ascii") as made:
            os.fchmod(descriptor, mode)  # whatever the umask
            made.write(f"{key}\n")
        yield
    except BaseException:
        file.unlink(missing_ok=True)
        raise
