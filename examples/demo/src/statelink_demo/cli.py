"""`statelink demo`: the command that this package adds. It starts the processes, and judges what they answer."""

from __future__ import annotations

import random
import sys
from contextlib import ExitStack
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

import statelink
from statelink.errors import StatelinkError
from statelink.testing.process import Process
from statelink_demo.messages import CHUNK_TOKENS, Answer, Request, Told

LENGTHS = range(100, 221)  # of prompts: at least two chunks, and hardly ever a whole number of pages
TITLES = {False: f"by chunks of {CHUNK_TOKENS} tokens", True: "by layers, during the forward pass"}
Run = tuple[dict[int, Told], dict[int, Told]]  # what prefill and decode say of each room


@click.command(short_help="Hand over requests of a small model.")
@click.option("--backend", default="tcp", show_default=True, help="Use this installed backend.")
@click.option("--requests", type=click.IntRange(1, 64), default=4, show_default=True, help="Requests at once.")
@click.option("--tokens", type=click.IntRange(1, 1024), default=32, show_default=True, help="Tokens of each answer.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of weights and prompts.")
@click.option("--sabotage", multiple=True, metavar="POOL", help="Zero this pool, such as k.3, of one more request.")
def demo(backend: str, requests: int, tokens: int, seed: int, sabotage: tuple[str, ...]) -> None:
    """Hand requests of a small hybrid model from a prefill process to a decode process.

    Decode never sees a prompt: it generates from the state that Statelink moved. A third process runs the same model
    with nothing moved, and what decode generates must be the same, bit for bit. With --sabotage, it must differ.
    """
    if len(sabotage) > requests:
        raise click.UsageError(f"{len(sabotage)} pools to sabotage, one a request, and only {requests} requests")
    console = Console(highlight=False, soft_wrap=True)
    try:
        if backend != "auto":
            statelink.probe(backend)  # says at once, and not after loading a model, that it cannot be used
        runs = {mode: _requests(seed, mode, requests, sabotage) for mode in TITLES}
        good = _run(console, backend, tokens, seed, runs)
    except StatelinkError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(not good)


def worker(kind: str, *arguments: Any) -> Any:
    """What lives in a process. Runs there: torch and transformers take seconds to import."""
    from statelink_demo import workers

    return getattr(workers, kind)(*arguments)


def _requests(seed: int, by_layer: bool, count: int, sabotage: tuple[str, ...]) -> list[Request]:
    # Other prompts in each run, so that nothing left of one passes in the next.
    rng, found = random.Random(f"{seed} {by_layer}"), []
    for pool in (*sabotage, *[""] * (count - len(sabotage))):
        prompt = tuple(rng.choices(range(512), k=rng.choice(LENGTHS)))
        found.append(Request(rng.getrandbits(64) or 1, len(prompt), pool, prompt))  # any 64 bits but zero
    return found


def _run(console: Console, backend: str, tokens: int, seed: int, runs: dict[bool, list[Request]]) -> bool:
    """Have every request answered in one process and in two, and show what became of it; whether all are right."""
    most, found = max(map(len, runs.values())), dict[bool, Run]()
    with ExitStack() as stack:
        console.print("loading the model, in three processes")
        made = {"reference": partial(worker, "Reference", seed, tokens)}
        made |= {role: partial(worker, "Side", role, backend, most, seed, tokens) for role in ("prefill", "decode")}
        started = [stack.enter_context(Process(each, name=role, patience=300.0)) for role, each in made.items()]
        alone, prefill, decode = started
        console.print(f"reference: {len(runs) * most} requests in one process")  # before what is timed
        answers: dict[int, Answer] = alone(methodcaller("answer", [each for asked in runs.values() for each in asked]))
        for mode, asked in runs.items():
            console.print(f"{len(asked)} requests, {TITLES[mode]}")
            unseen = [each._replace(prompt=()) for each in asked]
            decode.start(methodcaller("decode", unseen, prefill(attrgetter("link.address"))))
            prefill.start(methodcaller("prefill", asked, mode))
            found[mode] = prefill.result(), decode.result()
        for process in started:
            if status := process.leave():
                raise StatelinkError(f"{process.name} ended with status {status}", cause=process.log())
    console.print(_table(found, backend))
    console.print("ms: mean, from a component's last push until decode could use the request", style="italic")
    return all([_verdict(console, TITLES[mode], runs[mode], found[mode], answers) for mode in runs])


def _table(found: dict[bool, Run], backend: str) -> Table:
    table = Table(title=f"moved from prefill to decode over {backend}", title_justify="left")
    for name in ("run, component", "bytes", "blocks", "pushes", "ms"):
        table.add_column(name, justify="left" if "," in name else "right")
    for mode, (sent, served) in found.items():
        table.add_row(Text(TITLES[mode], style="bold"))
        ends = [(sent[room], each) for room, each in served.items() if each.moved]
        for name in sorted({name for _, each in ends for name in each.moved}):
            nbytes, blocks = (sum(each.moved[name][which] for _, each in ends) for which in (0, 1))
            pushes = sum(len(each.pushed[name]) for each, _ in ends)
            waited = sum(end.arrived - begin.pushed[name][-1] for begin, end in ends) / len(ends)
            table.add_row(f"  {name}", f"{nbytes:,}", f"{blocks:,}", f"{pushes:,}", f"{waited * 1e3:.1f}")
        table.add_section()
    return table


def _verdict(console: Console, title: str, asked: list[Request], run: Run, answers: dict[int, Answer]) -> bool:
    sent, served = run
    problems = [list(_problems(each, sent[each.room], served[each.room], answers[each.room])) for each in asked]
    wrong, count, tokens = sum(map(bool, problems)), len(asked), len(answers[asked[0].room].tokens)
    said = f"as in one process: first-step logits bit-equal, {tokens} tokens identical"
    mark = "[bold red]WRONG[/]" if wrong else "[bold green]ok[/]   "
    console.print(f"{mark} {title}: {wrong or count} of {count} requests {'not as in one process' if wrong else said}")
    for number, (each, found) in enumerate(zip(asked, problems, strict=True), 1):
        for problem in found:
            console.print(Text(f"  request {number} (room {each.room}): {problem}"))
    return not wrong


def _problems(request: Request, sent: Told, served: Told, wanted: Answer) -> Any:
    """Everything that is not as it should be, in words: pools by their digests, and the answer by the reference."""
    altered = [name for name in sent.digests if served.digests.get(name) != sent.digests[name]]
    if altered and served.digests:
        purpose = f" (zeroed on purpose: {request.sabotage})" if request.sabotage else ""
        yield f"not what prefill held: {', '.join(altered)}{purpose}"
    if (got := served.answer) is None:
        yield served.failed or sent.failed or "there is no answer"
        return
    if sent.failed:
        yield sent.failed
    bits, expected = (np.frombuffer(each.logits, np.uint16) for each in (got, wanted))
    # All exponent bits set is an infinity or NaN, which equals nothing.
    if differ := int(np.count_nonzero((bits != expected) | (expected & 0x7F80 == 0x7F80))):
        yield f"first-step logits differ in {differ} of {len(expected)} places"
    if got.tokens != wanted.tokens:
        yield f"the tokens are {got.tokens}, and the reference has {wanted.tokens}"
    if got[:2] != wanted[:2]:
        yield f"prefill's token arrived as {got[:2]}, and the reference has {wanted[:2]}"
