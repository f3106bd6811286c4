"""``statelink``: the command group, with its own commands and those of other packages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from statelink import __version__
from statelink.registry import entry_points, known_packages, missing_hint

from ._alone import end_all
from ._backends import backends
from ._doctor import doctor
from ._inspect import inspect
from ._keys import keys
from ._new_backend import new_backend
from ._output import Program
from ._rendezvous import rendezvous
from .top import top

if TYPE_CHECKING:
    import importlib.metadata

__all__ = ["main"]

GROUP = "statelink.commands"
"""Entry-point group of click commands that other packages add."""

BROUGHT = {
    "bench": "Measure backends between two processes.",
    "conform": "Test a backend against its contract.",
    "demo": "Hand over requests of a small model.",
    "explain": "Plan a request between two fleets.",
}
"""Commands of other packages that are listed even if the package is not installed, and what each does."""


class _Commands(Program):
    """Lists commands of other packages by name, and imports only the one that is called."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """See `Program.main`. What a command has started has ended when this does."""
        try:
            return super().main(*args, **extra)
        finally:
            end_all()

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *BROUGHT, *(point.name for point in _points())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        for point in _points():
            if point.name == cmd_name:
                return _load(point)
        return _absent(cmd_name) if cmd_name in BROUGHT else None


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


def _absent(name: str) -> click.Command:
    message = f"{name!r} is brought by a package of its own\nhint: {missing_hint(GROUP, name)}"
    return _failing(name, message, f"{BROUGHT[name]} Needs {known_packages(GROUP)[name]}.", _AbsentError)


class _AbsentError(click.ClickException):
    """A command whose package is not here. The status is that of a command that nobody knows."""

    exit_code = 2


def _failing(
    name: str, message: str, does: str = "", error: type[click.ClickException] = click.ClickException
) -> click.Command:
    def fail(args: tuple[str, ...]) -> None:
        raise error(message)

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
main.add_command(doctor)
main.add_command(keys)
main.add_command(new_backend)
main.add_command(rendezvous)
main.add_command(inspect)
main.add_command(top)
