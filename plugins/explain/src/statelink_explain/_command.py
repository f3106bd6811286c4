"""``statelink explain``: says whether two fleets can work together, and what a request between them costs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from statelink.cli import CodedError, Number, duration, json_option, picture_path, print_json, size
from statelink.errors import StatelinkError
from statelink.registry import load_backend

from ._estimate import Estimate, Worth, estimate, worth
from ._flows import draw_flows
from ._layout import read_side
from ._model import Model, preset, presets
from ._report import Rank, Report
from ._report import explain as report_of
from ._values import ROUND_TRIP, Rate, RateType

__all__ = ["explain"]

FILE = click.Path(exists=True, path_type=Path)


def _list_presets(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    for name in presets():
        model = preset(name)
        click.echo(f"{name}: {model.layers} layers\n  from: {model.source}")
        if model.note:
            click.echo(f"  note: {model.note}")
    context.exit()


@click.command()
@click.argument("prefill", type=FILE)
@click.argument("decode", type=FILE)
@click.option(
    "--tokens", default=8192, show_default=True, type=click.IntRange(min=1), help="Plan a prompt of this many tokens."
)
@click.option(
    "--prefix",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Plan with this many tokens that decode holds.",
)
@click.option(
    "--rate",
    type=RateType(),
    metavar="RATE",
    help="Estimate the time, at this rate of a line, such as 10gbit or 400mbit.",
)
@click.option(
    "--rtt", type=ROUND_TRIP, metavar="TIME", help="Estimate the time with this round trip, such as 30ms or 200us."
)
@click.option(
    "--prefill-rate",
    type=Number(min=0.001, max=1e9),
    metavar="TOKENS",
    help="Say from which prompt on moving takes less time than computing so many tokens a second.",
)
@click.option("--backend", default="", help="Estimate with what this installed backend says that a block costs.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=picture_path,
    help="Draw the plan to this file, an SVG or PNG (needs ./core[plot]).",
)
@json_option
@click.option(
    "--presets", is_flag=True, is_eager=True, expose_value=False, callback=_list_presets, help="List the known models."
)
def explain(
    prefill: Path,
    decode: Path,
    tokens: int,
    prefix: int,
    rate: Rate | None,
    rtt: float | None,
    prefill_rate: float | None,
    backend: str,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Plan a request between two fleets.

    Says whether the two can work together, and what a request between them costs. PREFILL and DECODE are TOML files:
    `preset = "..."`, `config = "..."` (a model's config.json) or a section [model], and a section [layout]. A
    config.json, or a model's folder, is a side of one rank. Needs no accelerator, and allocates nothing. If the two
    cannot work together, prints the error that links would raise, and exits with 1.
    """
    for name, given in (("--backend", backend), ("--rtt", rtt), ("--prefill-rate", prefill_rate)):
        if given and rate is None:
            raise click.UsageError(f"{name} needs --rate")
    block_seconds = load_backend(backend).capabilities.block_seconds if backend else 0.0
    try:
        sides = read_side(prefill, "prefill"), read_side(decode, "decode")
        report = report_of(*sides, tokens=tokens, prefix=prefix)
    except StatelinkError as error:
        _refuse(error, as_json)
    took = None if rate is None else estimate(report, rate.bytes_per_second, block_seconds, round_trip=rtt or 0.0)
    pays = None
    if prefill_rate is not None and rate is not None:
        pays = worth(
            *sides,
            tokens_per_second=prefill_rate,
            bytes_per_second=rate.bytes_per_second,
            round_trip=rtt or 0.0,
        )
    if as_json:
        source = {name: side.model.source for name, side in zip(("prefill", "decode"), sides, strict=True)}
        print_json(
            {**msgspec.to_builtins(report), "source": source, "estimate": took, "worth": pays and pays._asdict()}
        )
    else:
        _print(report, dict.fromkeys(side.model for side in sides))
        if took is not None and rate is not None:
            _print_time(took, rate, rtt, block_seconds)
        if pays is not None and prefill_rate is not None:
            _print_worth(pays, prefill_rate)
    if plot is not None:
        draw_flows(report, plot, _labels(report))
        click.echo(f"wrote {plot}", err=True)


def _refuse(error: StatelinkError, as_json: bool) -> NoReturn:
    if not as_json:
        raise CodedError(error)
    refused = {"refused": {**msgspec.to_builtins(error.reason), "message": str(error)}}
    print_json(refused)
    raise SystemExit(1)


def _print(report: Report, models: Iterable[Model]) -> None:
    console = Console()
    fleets = [f"{len(ranks)} rank{'s' * (len(ranks) > 1)}" for ranks in (report.prefill, report.decode)]
    held = f", of which decode holds {report.prefix:,}" if report.prefix else ""
    console.print(Text(f"{report.model}: {fleets[0]} of prefill can serve {fleets[1]} of decode"))
    console.print(Text(f"a request of {report.tokens:,} tokens{held}: {size(report.nbytes)}"))
    for model in models:
        for word, said in (("from", model.source), ("note", model.note)):
            if said:
                console.print(Text(f"{word}: {said}"))
    console.print(Text("(blocks × mean size, with consecutive pages and with scattered ones)\n"))

    table = _table("prefill", "decode", "component", "bytes", "consecutive", "scattered")
    marks = sorted({flow.mark for flow in report.flows if flow.mark})
    numbers = {mark: f"[{number}]" for number, mark in enumerate(marks, 1)}
    prefill, decode = _labels(report)
    last = None
    for flow in report.flows:
        pair = (flow.source, flow.target)
        # As text, not markup, because the marks are in brackets.
        cells = ("", "") if pair == last else (prefill[flow.source], decode[flow.target])
        last = pair
        counts = _counts(flow.nbytes, flow.blocks, flow.blocks_random)
        table.add_row(*map(Text, (*cells, flow.component, *counts, numbers.get(flow.mark, ""))))
    console.print(table)
    for mark, number in numbers.items():
        console.print(Text(f"{number} {mark}"))

    console.print()
    table = _table("component", "type", "bytes", "consecutive", "scattered")
    for total in report.totals:
        counts = _counts(total.nbytes, total.blocks, total.blocks_random)
        table.add_row(*map(Text, (total.component, total.type, *counts, "")))
    console.print(table)

    console.print()
    table = _table("rank", "bytes")
    for side, ranks, verb in (("prefill", report.prefill, "sends"), ("decode", report.decode, "receives")):
        for rank in ranks:
            idle = "" if rank.told_by is None else f"no part: told so by decode {decode[rank.told_by]}"
            table.add_row(*map(Text, (f"{side} {_label(rank)} {verb}", size(rank.nbytes), idle)))
    console.print(table)


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in (*titles, ""):
        right = title in ("bytes", "consecutive", "scattered")
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    return table


def _counts(nbytes: int, *blocks: int) -> tuple[str, ...]:
    return size(nbytes), *(f"{count:,} × {size(nbytes // count)}" if count else "0" for count in blocks)


def _print_time(took: Estimate, rate: Rate, rtt: float | None, block_seconds: float) -> None:
    away = "" if rtt is None else f" and a round trip of {duration(rtt)}"
    lines = [f"at {rate.words} for each rank{away}: at least {duration(took.bytes)}"]
    if took.shared > took.bytes:
        lines.append(f"over one line that all ranks share: at least {duration(took.shared)}")
    if block_seconds:
        side, number = took.slowest
        lines.append(
            f"with {duration(block_seconds)} a block: {duration(took.consecutive)} with consecutive pages, "
            f"{duration(took.scattered)} with scattered ones; the slowest is {side} {number}"
        )
    click.echo("\n" + "\n".join(lines))


def _print_worth(pays: Worth, prefill_rate: float) -> None:
    said = {tokens: "for no prompt" if tokens is None else f"from {tokens:,} tokens on" for tokens in pays}
    shared = "" if pays.shared == pays.apart else f"; over a shared line {said[pays.shared]}"
    what = f"moving takes less time than computing {prefill_rate:,.10g} tokens a second"
    click.echo(f"{what} {said[pays.apart]}{shared}")


def _labels(report: Report) -> tuple[dict[int, str], dict[int, str]]:
    prefill, decode = ({rank.rank: _label(rank) for rank in side} for side in (report.prefill, report.decode))
    return prefill, decode


def _label(rank: Rank) -> str:
    axes = " ".join(f"{name}{index}" for name, index in rank.axes.items())
    return f"{rank.rank} ({axes})" if axes else str(rank.rank)
