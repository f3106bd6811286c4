"""Verdicts: whether decode answered as the reference did, and if not, what went wrong where."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statelink_demo.demo import Log, Run
    from statelink_demo.messages import Answer

__all__ = ["Component", "RunReport", "Verdict", "judge"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one request.

    Attributes:
        request: Its number in the run, from 1.
        room: Its id.
        tokens: Length of its prompt.
        ok: Whether everything is as it should be.
        moved: Whether the room succeeded on both sides.
        refused: Whether decode refused its metadata row.
        logits_equal: Whether the first step's logits are those of the reference, bit for bit.
        tokens_equal: Whether the tokens are.
        altered: Pools whose content on decode was not what prefill had.
        sabotage: Pool that was zeroed on purpose.
        problems: Everything that is not as it should be, in words.
    """

    request: int
    room: int
    tokens: int
    ok: bool
    moved: bool
    refused: bool
    logits_equal: bool
    tokens_equal: bool
    altered: tuple[str, ...]
    sabotage: str
    problems: tuple[str, ...]


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """What moved of one component, over all requests of a run.

    Attributes:
        nbytes: Bytes.
        blocks: Blocks handed to the backend.
        pushes: Pushes that carried some of it.
        ms: Mean milliseconds from its last push until decode could use the request.
    """

    nbytes: int
    blocks: int
    pushes: int
    ms: float


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run: its requests, and what moved of those that succeeded.

    Attributes:
        title: How it pushed.
        by_layer: Whether it pushed by layers.
        ok: Whether every request is as it should be.
        verdicts: One a request.
        components: By name.
    """

    title: str
    by_layer: bool
    ok: bool
    verdicts: tuple[Verdict, ...]
    components: dict[str, Component]


def judge(run: Run) -> RunReport:
    """Compare every request of a run with the reference, and sum up what moved."""
    logs = list(run.logs.values())
    verdicts = tuple(_verdict(number, log) for number, log in enumerate(logs, 1))
    return RunReport(
        title=run.title,
        by_layer=run.by_layer,
        ok=all(verdict.ok for verdict in verdicts),
        verdicts=verdicts,
        components=_components(logs),
    )


def _verdict(number: int, log: Log) -> Verdict:
    problems: list[str] = []
    # The first reason crosses the wire: both sides give the same one, and one of them is enough.
    problems.extend(f"the room failed: {why}" for why in list(log.failures.values())[:1])
    missing = [role for role, end in (("prefill", log.sent), ("decode", log.served)) if end is None]
    if missing and not problems:
        problems.append(f"{' and '.join(missing)} did not come to an end")
    altered: tuple[str, ...] = ()
    if log.sent is not None and log.served is not None:
        ours, theirs = log.sent.digests, log.served.digests
        altered = tuple(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
    if altered:
        said = f" (zeroed on purpose: {log.sabotage})" if log.sabotage else ""
        problems.append(f"not what prefill held: {', '.join(altered)}{said}")
    refused = "" if log.served is None else log.served.refused
    if refused:
        problems.append(f"decode refused it: {refused}")
    logits_equal = tokens_equal = False
    if log.served is not None and log.served.answer is not None and log.reference is not None:
        wrong = _differences(log.served.answer, log.reference)
        problems.extend(wrong.values())
        logits_equal, tokens_equal = "logits" not in wrong, "tokens" not in wrong
    elif not problems:
        problems.append("there is no answer to compare")
    return Verdict(
        request=number,
        room=log.prompt.room,
        tokens=len(log.prompt.prompt),
        ok=not problems,
        moved=not missing and not log.failures,
        refused=bool(refused),
        logits_equal=logits_equal,
        tokens_equal=tokens_equal,
        altered=altered,
        sabotage=log.sabotage,
        problems=tuple(problems),
    )


def _differences(got: Answer, wanted: Answer) -> dict[str, str]:
    """Say in which fields two answers differ."""
    found = {}
    bits, expected = (np.frombuffer(each.logits, np.uint16) for each in (got, wanted))
    # All exponent bits set is an infinity or NaN, which equals nothing.
    wrong = int(np.count_nonzero((bits != expected) | (expected & 0x7F80 == 0x7F80)))
    if wrong:
        found["logits"] = f"first-step logits differ in {wrong} of {len(expected)} places"
    if got.tokens != wanted.tokens:
        pairs = enumerate(zip(got.tokens, wanted.tokens, strict=True), 1)
        number, (ours, theirs) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
        found["tokens"] = f"token {number} is {ours}, the reference has {theirs}"
    if (got.first_token, got.first_logprob) != (wanted.first_token, wanted.first_logprob):
        found["first"] = (
            f"prefill's token arrived as {got.first_token} with logprob {got.first_logprob:.6g}, "
            f"the reference has {wanted.first_token} with {wanted.first_logprob:.6g}"
        )
    return found


def _components(logs: Sequence[Log]) -> dict[str, Component]:
    ends = [(log.sent, log.served) for log in logs if log.sent is not None and log.served is not None]
    found = {}
    for name in sorted({name for _, served in ends for name in served.moved}):
        waits = [1e3 * (served.arrived - sent.pushed[name][-1]) for sent, served in ends]
        found[name] = Component(
            nbytes=sum(served.moved[name][0] for _, served in ends),
            blocks=sum(served.moved[name][1] for _, served in ends),
            pushes=sum(len(sent.pushed[name]) for sent, _ in ends),
            ms=round(sum(waits) / len(waits), 3),
        )
    return found
