"""The command: its options, its progress, and what it prints."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from statelink.cli import duration, json_option, key_fields, pair, picture_path, print_json, seconds, size
from statelink.config import read_options
from statelink.errors import StatelinkError
from statelink.registry import load_backend
from statelink.wire import ENVIRONMENT, Keys, host_of, parse_endpoint

from ._ends import End, Local, Remote
from ._measure import Cell, Found, Plan, measure
from ._messages import LARGEST_BLOCK, MOST_BLOCKS
from ._server import Server
from ._show import draw, plain, table

__all__ = ["bench"]

MOST_WAITED = 0.2
"""The part of their time for which the copies may wait for a core. Above, a line says so beside the figures."""

SUFFIXES = {"": 0, "k": 10, "m": 20, "g": 30}


def _bytes(value: str | int) -> int:
    """A number of bytes, such as 4096, 64k or 1m; units are powers of 1024."""
    if isinstance(value, int):
        return value
    digits = value.rstrip("kmgKMG")
    suffix = value[len(digits) :].lower()
    if not digits.isdecimal() or suffix not in SUFFIXES or not int(digits):
        raise click.BadParameter(f"{value!r} is no number of bytes, such as 4096, 64k or 1m")
    number = int(digits) << SUFFIXES[suffix]
    if number > LARGEST_BLOCK:
        raise click.BadParameter(f"{value!r} is more than {LARGEST_BLOCK >> 30}g")
    return number


@click.command()
@click.argument("names", metavar="BACKEND...", nargs=-1)
@click.option("--peer", default="", metavar="ADDRESS", help="Measure between this host and the server at ADDRESS.")
@click.option("--serve", "listen", default="", metavar="ADDRESS", help="Serve at tcp://HOST:PORT for other hosts.")
@click.option(
    "--size",
    "sizes",
    type=_bytes,
    metavar="BYTES",
    multiple=True,
    default=(4096, 65536, 1 << 20),
    show_default=True,
    help="Move blocks of this size.",
)
@click.option(
    "--blocks",
    "counts",
    type=click.IntRange(1, MOST_BLOCKS),
    multiple=True,
    default=(1, 64, 1024),
    show_default=True,
    help="Move so many at once.",
)
@click.option(
    "--scattered/--consecutive", default=True, show_default=True, help="Move blocks that are apart, or side by side."
)
@click.option("--seconds", type=seconds(0.01), default=1.0, show_default=True, help="Measure each cell for so long.")
@click.option(
    "--most", type=_bytes, metavar="BYTES", default="256m", show_default=True, help="Leave out requests of more bytes."
)
@click.option("--raw/--no-raw", default=True, show_default=True, help="Measure each library by itself, too.")
@click.option(
    "--option", "-o", "pairs", multiple=True, metavar="KEY=VALUE", help="Set an option of the backend, if it is one."
)
@click.option("--memory", default="dram", show_default=True, help="Move memory of this kind, such as cuda:0 or npu:0.")
@click.option(
    "--allocator", default="", metavar="MODULE:NAME", help="Allocate memory of a device here with this function."
)
@click.option("--host", default="", help="Tell the other host this address of this one; found out by default.")
@click.option("--secret-file", default="", help="Read this host's secret key from this file.")
@click.option("--allow-file", default="", help="Let in the public keys of this file, or of the *.pub files of it.")
@click.option("--insecure", is_flag=True, help="Use another host without keys; for trusted networks only.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=picture_path,
    help="Draw the curves to this file, an SVG or PNG (needs ./core[plot]).",
)
@json_option
def bench(
    names: tuple[str, ...],
    peer: str,
    listen: str,
    sizes: tuple[int, ...],
    counts: tuple[int, ...],
    scattered: bool,
    seconds: float,
    most: int,
    raw: bool,
    pairs: tuple[str, ...],
    memory: str,
    allocator: str,
    host: str,
    secret_file: str,
    allow_file: str,
    insecure: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure backends between two processes.

    For each BACKEND, size and number of blocks, measures requests, the library by itself, and a copy of the same blocks
    inside one process. The bytes of the first requests are compared. Both processes are on this host, unless --peer
    names a server: `statelink bench --serve tcp://HOST:PORT` on another host. Options that say BYTES take 4096, 64k or
    1m. --size and --blocks may be repeated. Keys also come from the environment, as for `statelink rendezvous`. Exits
    with 1 if a backend could not be measured. Pictures need matplotlib: pip install './core[plot]'.
    """
    named = key_fields(secret_file, allow_file)
    if listen:
        if names or peer:
            raise click.UsageError("--serve takes no BACKEND and no --peer")
        _serve(listen, host, _keys(named), named, insecure, allocator, most, as_json)
        return
    if not names:
        raise click.UsageError("name at least one BACKEND; `statelink backends` lists them")
    options = dict(pair(each) for each in pairs)
    if options and len(names) > 1:
        raise click.UsageError("--option needs exactly one BACKEND")
    for name in names:
        kind = load_backend(name)
        read_options(kind.Options, options, f"options of backend {name!r}")
    plan = Plan(
        sizes=tuple(sorted(set(sizes))),
        counts=tuple(sorted(set(counts))),
        scattered=scattered,
        seconds=seconds,
        most=most,
        memory=(memory, allocator),
        raw=raw,
    )
    if not plan.cells():
        raise click.UsageError(f"--most leaves out every request: it allows {size(most)}")
    here = host or (_address_towards(peer) if peer else "127.0.0.1")
    config = _config(here, named, insecure) if peer else {}
    via = Via(peer, _keys(named) if peer else None, config, here)
    with contextlib.nullcontext() if peer else _no_keys():
        found = [_measure(name, options, plan, via) for name in names]
    if as_json:
        print_json(plain(found, plan, peer))
    else:
        _print(found, peer)
    if plot is not None:
        draw(found, plot)
        click.echo(f"wrote {plot}", err=True)
    if any(each.error for each in found):
        raise SystemExit(1)


def _keys(named: dict[str, Any] | None) -> Keys | None:
    return Keys(**named) if named else Keys.from_environment()


@contextlib.contextmanager
def _no_keys() -> Iterator[None]:
    """Within the block, the environment of this process has no keys. Links of one host need none."""
    kept = {name: os.environ.pop(name) for name in ENVIRONMENT if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


class Via:
    """How the two sides reach each other.

    Attributes:
        peer: Address of the server on the other host; empty for two processes of this one.
        keys: Keys of this process, for the server.
        config: Further keys of the configuration of links here.
        host: Host under which the source reaches this one.
    """

    def __init__(self, peer: str, keys: Keys | None, config: dict[str, Any], host: str) -> None:
        self.peer, self.keys, self.config, self.host = peer, keys, config, host


def _measure(name: str, options: dict[str, Any], plan: Plan, via: Via) -> Found:
    """Measure one backend, and show the progress: in place on a terminal, otherwise with a line for each cell."""
    console, total = Console(stderr=True), len(plan.cells())
    with contextlib.ExitStack() as stack:
        status = stack.enter_context(console.status(f"{name}: opening")) if console.is_terminal else None

        def say(done: int, cell: Cell) -> None:
            took = duration(cell.request.median)
            text = f"{name}: {done} of {total}: {cell.count} x {size(cell.block)} in {took}"
            if status is None:
                console.print(Text(text))
            else:
                status.update(Text(text))

        try:
            ends: list[End] = []
            for make in (_source(via), lambda: Local("decode")):
                ends.append(make())
                stack.callback(ends[-1].close)
        except StatelinkError as error:
            return Found(
                backend=name, transports=(), cells=(), error=str(error.reason).partition("\nhint:")[0], hint=error.hint
            )
        return measure(name, options, plan, (ends[0], ends[1]), config=via.config, host=via.host, say=say)


def _source(via: Via) -> Any:
    return (lambda: Remote(via.peer, via.keys)) if via.peer else (lambda: Local("prefill"))


def _print(found: list[Found], peer: str) -> None:
    console = Console()
    console.print(table(found))
    for each in found:
        if each.transports:
            console.print(Text(f"{each.backend}: {', '.join(each.transports)}", style="dim"))
        if each.raw:
            console.print(Text(f"{each.backend}: raw: {each.raw}", style="dim"))
        if each.waited > MOST_WAITED:
            waited = f"the copies waited for a core for {100 * each.waited:.0f} % of their time"
            console.print(
                Text(f"{each.backend}: this machine is too busy for these figures: {waited}", style="bold red")
            )
        if each.error:
            console.print(Text(f"{each.backend}: {each.error}", style="bold red"))
            if each.hint:
                console.print(Text(f"  hint: {each.hint}"))
    where = f"this host and {parse_endpoint(peer).address}" if peer else "two processes of this host"
    text = f"between {where}; median of requests; raw is the library alone, copy one thread of one process"
    console.print(Text(text, style="dim"))


def _serve(
    listen: str,
    host: str,
    keys: Keys | None,
    named: dict[str, Any] | None,
    insecure: bool,
    allocator: str,
    most: int,
    as_json: bool,
) -> None:
    at = host or host_of(parse_endpoint(listen).address)
    config = _config(at, named, insecure)
    server = Server(listen, advertise=host, keys=keys, insecure=insecure, config=config, allocator=allocator, most=most)
    with _until_signal(server):
        if as_json:
            print_json({"address": server.address})
        else:
            click.echo(server.address)
        server.serve()


@contextlib.contextmanager
def _until_signal(server: Server) -> Iterator[None]:
    """Within the block, SIGINT and SIGTERM end the server's answers. Neither is an error.

    They raise nothing: Python ignores what a handler raises inside a ``__del__`` or a weak reference's callback.
    """
    before = {each: signal.signal(each, lambda *_: server.stop()) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        server.close()


def _config(host: str, named: dict[str, Any] | None, insecure: bool) -> dict[str, Any]:
    """What links on this host are configured with, so that those of another host reach them."""
    shown = f"[{host}]" if ":" in host else host
    config: dict[str, Any] = {"listen": f"tcp://{shown}:0", "insecure": insecure}
    return {**config, "keys": named} if named is not None else config


def _address_towards(peer: str) -> str:
    """This host's address on the way to another one. Sends nothing."""
    address = parse_endpoint(peer).address
    host, port = host_of(address), int(address.rpartition(":")[2])
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise click.ClickException(f"{host} cannot be reached: {error.strerror or error}") from error
