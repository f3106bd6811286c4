"""``statelink``: the command group, with its own commands and those of other packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from statelink import __version__
from statelink.hints import install_hint
from statelink.registry import entry_points

from ._backends import backends
from ._conform import conform
from ._doctor import doctor
from ._explain import explain
from ._inspect import inspect
from ._keys import keys
from ._new_backend import new_backend
from ._output import Program
from ._rendezvous import rendezvous
from .bench import bench
from .top import top

if TYPE_CHECKING:
    import importlib.metadata

__all__ = ["main"]

GROUP = "statelink.commands"
"""Entry-point group of click commands that other packages add."""

BROUGHT_BY = {"demo": ("statelink-demo", "Hand over requests of a small model.")}
"""Commands of other packages that are listed even if the package is not installed: the package, and what each does."""


class _Commands(Program):
    """Lists commands of other packages by name, and imports only the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *BROUGHT_BY, *(point.name for point in _points())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        for point in _points():
            if point.name == cmd_name:
                return _load(point)
        if cmd_name in BROUGHT_BY:
            return _absent(cmd_name, *BROUGHT_BY[cmd_name])
        return None


def _points() -> list[importlib.metadata.EntryPoint]:
    return [point for point, _, _ in entry_points(GROUP)]


def _load(point: importlib.metadata.EntryPoint) -> click.Command:
    """The command. If its package is broken, a command that says why, so that ``--help`` of the group never fails."""
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:
        brought = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
        return _failing(
            point.name, f"command {point.name!r} ({brought}) failed to load: {type(error).__name__}: {error}"
        )
    if not isinstance(loaded, click.Command):
        return _failing(point.name, f"command {point.name!r} is {loaded!r:.80}, not a click command")
    return loaded


def _absent(name: str, distribution: str, does: str) -> click.Command:
    message = f"{name!r} is brought by a package of its own\nhint: {install_hint(distribution)}"
    return _failing(name, message, f"{does} Needs {distribution}.")


def _failing(name: str, message: str, does: str = "") -> click.Command:
    def fail(args: tuple[str, ...]) -> None:
        raise click.ClickException(message)

    arguments = click.Argument(["args"], nargs=-1, type=click.UNPROCESSED)
    return click.Command(
        name,
        callback=fail,
        params=[arguments],
        help=message,
        short_help=does or message.splitlines()[0],
        context_settings={"ignore_unknown_options": True},
    )


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="statelink")
def main() -> None:
    """Move the state of inference requests from prefill to decode."""


main.add_command(backends)
main.add_command(conform)
main.add_command(doctor)
main.add_command(explain)
main.add_command(keys)
main.add_command(new_backend)
main.add_command(rendezvous)
main.add_command(inspect)
main.add_command(top)
main.add_command(bench)
