"""`statelink demo`: the command that this package adds."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console

import statelink
from statelink.errors import StatelinkError
from statelink.state import aux_rows, describe
from statelink_demo.crew import DemoError
from statelink_demo.demo import Settings, run_demo
from statelink_demo.display import Bars, Display, Lines, Silent
from statelink_demo.judge import judge
from statelink_demo.report import print_reports

if TYPE_CHECKING:
    from statelink_demo.judge import RunReport

__all__ = ["demo"]


@click.command()
@click.option("--backend", default="tcp", show_default=True, help="Name of an installed backend.")
@click.option("--requests", type=click.IntRange(1, 256), default=4, show_default=True, help="Concurrent requests.")
@click.option("--tokens", type=click.IntRange(1, 1024), default=32, show_default=True, help="Tokens to generate.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the weights and prompts.")
@click.option(
    "--by-layer/--no-by-layer",
    default=None,
    help="Push by layers during the forward pass, or by chunks after it. Both, one after the other, if not given.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(1),
    default=120.0,
    show_default=True,
    help="Seconds that a request, or silence, may take.",
)
@click.option("--plain", is_flag=True, help="No progress bars.")
@click.option("--json", "as_json", is_flag=True, help="Print a report for scripts, and nothing else.")
@click.option(
    "--sabotage",
    multiple=True,
    metavar="POOL",
    help="Self-test: zero this pool (k.3, conv.0, counts, ...) of one more request on decode, once it has arrived. "
    "The demo must then fail. Repeatable.",
)
def demo(
    backend: str,
    requests: int,
    tokens: int,
    seed: int,
    by_layer: bool | None,
    timeout: float,
    plain: bool,
    as_json: bool,
    sabotage: tuple[str, ...],
) -> None:
    """Hand requests of a small hybrid model from a prefill process to a decode process.

    Decode never sees a prompt: it generates from the state that Statelink moved. A third process runs the same model
    with nothing moved, and what decode generates must be the same, bit for bit.
    """
    if len(sabotage) > requests:
        raise click.UsageError(f"{len(sabotage)} pools to sabotage, one a request, and only {requests} requests")
    settings = Settings(
        backend=backend,
        requests=requests,
        tokens=tokens,
        seed=seed,
        modes=(False, True) if by_layer is None else (by_layer,),
        timeout=timeout,
        sabotage=sabotage,
    )
    console = Console()
    display: Display = Silent() if as_json else Bars(console) if console.is_terminal and not plain else Lines(console)
    try:
        _check_backend(backend)
        with display:
            runs = run_demo(settings, display)
    except (StatelinkError, DemoError) as error:
        raise click.ClickException(str(error)) from error
    reports = [judge(run) for run in runs]
    if as_json:
        click.echo(_json(settings, reports))
    else:
        print_reports(console, reports, backend, tokens)
    if not all(report.ok for report in reports) or len(reports) < len(settings.modes):
        sys.exit(1)


def _check_backend(name: str) -> None:
    """Say at once, and not after loading a model, that there is no such backend.

    Raises:
        StatelinkError: There is none; says whether it is a typo or a package that is not installed.
    """
    if name not in {listed.name for listed in statelink.list_backends()}:
        import numpy as np

        nothing = describe("demo", [aux_rows({"row": np.zeros((1, 1), np.uint8)})])
        statelink.open({"role": "prefill", "backend": name}, nothing).close()


def _json(settings: Settings, reports: list[RunReport]) -> str:
    content = {
        "backend": settings.backend,
        "tokens": settings.tokens,
        "seed": settings.seed,
        "ok": all(report.ok for report in reports) and len(reports) == len(settings.modes),
        "runs": msgspec.to_builtins(reports),
    }
    return json.dumps(content, indent=2)
